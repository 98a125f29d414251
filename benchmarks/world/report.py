"""Steps by strategy and link, as a table."""

import statistics
from typing import Any

from benchmarks.sweep import links
from gradcomp_jax import _markdown

START, END = "<!-- world-table -->", "<!-- /world-table -->"


def table(results: dict[str, Any]) -> str:
    """Seconds of a step, and the fraction of the same strategy's throughput over a link without limits."""
    cells = {(c["strategy"], c["rate"], c["delay_s"]): c["steps_s"] for c in results["cells"]}
    places = list(dict.fromkeys((c["rate"], c["delay_s"]) for c in results["cells"]))
    names = list(dict.fromkeys(c["strategy"] for c in results["cells"]))
    head = [f"{links.rate_name(rate)}, {links.delay_name(delay_s)}" for rate, delay_s in places]
    rows = []
    for name in names:
        free = cells.get((name, None, 0.0))
        row = []
        for place in places:
            taken = cells.get((name, *place))
            row.append("" if taken is None else _cell(taken, free if place != (None, 0.0) else None))
        rows.append((name, *row))
    return "\n".join(_markdown.table(("strategy", *head), rows, align="lr"))


def _cell(taken: list[float], free: list[float] | None) -> str:
    text = f"{statistics.median(taken):.3f} s ({min(taken):.3f} .. {max(taken):.3f})"
    return text if free is None else f"{text}, {statistics.median(free) / statistics.median(taken):.0%}"


def markdown(results: dict[str, Any], command: str) -> str:
    """What stands between the two lines of the document."""
    machine = ", ".join(f"{k} {v}" for k, v in results["machine"].items())
    versions = ", ".join(f"{k} {v}" for k, v in results["versions"].items())
    return "\n".join(
        [
            f"`{command}`",
            "",
            f"{machine}; {versions}.",
            "",
            f"{results['model']}, {results['values']:,} parameters, {results['source']}, {results['workers']} workers.",
            "",
            table(results),
            "",
        ]
    )
