"""The results as Markdown: bytes, step times, verdicts, time to a target loss, and the checks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradcomp_jax import _markdown

from .bounds import steps_to, target_loss, verdict
from .checks import checks
from .links import as_read, delay_name, rate_name
from .tasks import TASKS

START, END = "<!-- network-tables -->", "<!-- /network-tables -->"
Row = Mapping[str, Any]


def markdown(results: Mapping[str, Any], command: str) -> str:
    """Everything between the markers."""
    cells = sorted(results["cells"], key=as_read)
    lines = [f"`{command}`", "", _setting(results), "", *check_lines(cells), ""]
    for model, workers in sorted({(c["model"], c["workers"]) for c in cells}, reverse=True):
        group = [c for c in cells if (c["model"], c["workers"]) == (model, workers)]
        first = group[0]
        lines += [f"## {TASKS[model].summary[0].upper()}{TASKS[model].summary[1:]}: {workers} workers", ""]
        lines += [f"{first['values']:,} parameters; {first['source']}.", "", *_bytes(group), ""]
        lines += ["The fastest method:", "", *_verdicts(group), ""]
        for delay_s in dict.fromkeys(c["delay_s"] for c in group):
            lines += [*_times([c for c in group if c["delay_s"] == delay_s]), ""]
        training = results["training"].get(model)
        if training and training["workers"] == workers:
            lines += [*_to_target(group, training), ""]
    return "\n".join(lines)


def insert(document: str, text: str, start_line: str = START, end_line: str = END) -> str:
    """Puts the text between two lines of a document.

    Raises:
        ValueError: if it has not both lines.
    """
    before, start, rest = document.partition(start_line)
    _, end, after = rest.partition(end_line)
    if not start or not end:
        raise ValueError(f"the document needs the lines {start_line} and {end_line}")
    return f"{before}{start}\n\n{text}\n{end}{after}"


def check_lines(cells: Sequence[Row]) -> list[str]:
    """A table of :func:`checks.checks`."""
    words = {True: "pass", False: "**fail**", None: "not measured"}
    rows = ((c.claim, words[c.holds], c.numbers) for c in checks(cells))
    return _markdown.table(("claim", "", "measured"), rows, align="l")


def _setting(results: Mapping[str, Any]) -> str:
    machine, versions = results["machine"], results["versions"]
    where = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}"
    return f"{where}; {', '.join(f'{name} {version}' for name, version in versions.items())}."


def _bytes(group: Sequence[Row]) -> list[str]:
    cells: list[tuple[str, ...]] = []
    for name in group[0]["methods"]:
        rows = [c["methods"][name] for c in group if name in c["methods"]]
        ratios = [f(r["counted"] / r["sent"] for r in rows if r["counted"] is not None) for f in (_least, _most)]
        counted = "not counted" if ratios[0] is None else f"{ratios[0]:.3f} .. {ratios[1]:.3f}"
        kinds = ", ".join(f"{count} {kind}" for kind, count in rows[0]["collectives"].items())
        alone = " .. ".join(f"{s:.3f}" for s in sorted({f(r["alone_s"] for r in rows) for f in (min, max)}))
        cells.append((name, f"{rows[0]['sent']:,}", kinds, counted, alone))
    times = [c["nothing_s"] for c in group]
    cells.append(("no exchange", "0", "", "", f"{min(times):.3f} .. {max(times):.3f}"))
    heads = ("method", "bytes sent, by the program", "collectives", "counted / program", "alone, s")
    return _markdown.table(heads, cells, align="lrlrr")


def _least(values: Iterator[float]) -> float | None:
    return min(values, default=None)


def _most(values: Iterator[float]) -> float | None:
    return max(values, default=None)


def _verdicts(group: Sequence[Row]) -> list[str]:
    rates, delays = _axes(group)
    by_link = {(c["rate"], c["delay_s"]): verdict(c) for c in group}
    rows = ((delay_name(d), *(by_link.get((r, d), "") for r in rates)) for d in delays)
    return _markdown.table(("one way", *map(rate_name, rates)), rows, align="lr")


def _times(group: Sequence[Row]) -> list[str]:
    """Rows are methods, columns are rates; what loses to the better dense baseline is bold."""
    lines = [
        f"{delay_name(group[0]['delay_s'])} one way: seconds a step (least .. most; x dense, x dense-bf16)",
        "",
    ]
    rows = ((name, *(_time(c, name) for c in group)) for name in group[0]["methods"])
    return lines + _markdown.table(("method", *(rate_name(c["rate"]) for c in group)), rows, align="lr")


def _time(cell: Row, name: str) -> str:
    methods = cell["methods"]
    if name not in methods:
        return ""
    own, (least, most) = methods[name]["step_s"], methods[name]["range_s"]
    dense = {base: methods[base]["step_s"] for base in ("dense", "dense-bf16") if base in methods}
    text = f"{own:.3g} ({least:.3g} .. {most:.3g}; {', '.join(f'{t / own:.2f}x' for t in dense.values())})"
    return f"**{text}**" if dense and own > min(dense.values()) else text


def _to_target(group: Sequence[Row], training: Row) -> list[str]:
    """Composed: steps that were counted in one run, times seconds that were measured in each cell."""
    if "dense" not in training["losses"]:
        return []
    target = target_loss(training["losses"]["dense"])
    total = len(training["losses"]["dense"])
    lines = [f"Seconds to a training loss of {target:.3f} nats, which dense has after 70% of {total} steps"]
    lines[0] += " (composed: measured steps x measured seconds a step; no warm-up of density):"
    columns = [f"{rate_name(c['rate'])}, {delay_name(c['delay_s'])}" for c in group]
    rows = []
    for name, losses in training["losses"].items():
        steps = steps_to(losses, target)
        times = [c["methods"][name]["step_s"] if name in c["methods"] else None for c in group]
        words = ["-" if steps is None or t is None else f"{steps * t:.3g}" for t in times]
        rows.append((name, f"not in {total}" if steps is None else steps, *words))
    return [*lines, "", *_markdown.table(("method", "steps", *columns), rows, align="lr")]


def _axes(group: Sequence[Row]) -> tuple[list[float | None], list[float]]:
    return list(dict.fromkeys(c["rate"] for c in group)), list(dict.fromkeys(c["delay_s"] for c in group))
