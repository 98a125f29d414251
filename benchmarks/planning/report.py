"""Errors and decisions as Markdown."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.planning.validate import NEAR, Held, gain_of
from benchmarks.sweep.bounds import CLEAR, choose
from benchmarks.sweep.links import as_read, delay_name, rate_name
from gradcomp_jax._markdown import table

MEDIAN, WORST, RIGHT = 0.15, 0.35, 0.95
"""What is asked of the errors of predicted steps, and of the fraction of right verdicts."""

GAINS = 1.2
"""Below which a verdict is close, so that the error of what a method gains decides it."""


def checks(held: Sequence[Held]) -> list[tuple[str, bool, str]]:
    """Claim, whether it holds, and the figures."""
    off = sorted(abs(e) for one in held for e in one.errors.values())
    worst = max(((abs(e), one.key, n) for one in held for n, e in one.errors.items()), default=(0.0, "", ""))
    right = sum(one.right for one in held)
    near = sum(one.slower <= NEAR for one in held)
    middle = statistics.median(off)
    gains = [
        abs(gain_of(one.predicted) / gain_of(one.measured) - 1) for one in held if gain_of(one.measured) < GAINS
    ] or [0.0]
    over = sum(e > WORST for e in off)
    return [
        (f"median error of a step at most {100 * MEDIAN:.0f}%", middle <= MEDIAN, f"{100 * middle:.1f}% of {len(off)}"),
        (
            f"no error above {100 * WORST:.0f}%",
            over == 0,
            f"{over} of {len(off)} above; largest {100 * worst[0]:.0f}%, {worst[2]} at {worst[1]}",
        ),
        (
            f"verdict right in at least {100 * RIGHT:.0f}% of the cells",
            right >= RIGHT * len(held),
            f"{right} of {len(held)}",
        ),
        (
            f"median error of what a method gains at most {100 * (CLEAR - 1):.0f}% where it is below {GAINS}x",
            statistics.median(gains) <= CLEAR - 1,
            f"{100 * statistics.median(gains):.1f}% of {len(gains)}",
        ),
        (
            f"plan's choice at most {100 * (NEAR - 1):.0f}% slower than the fastest in as many",
            near >= RIGHT * len(held),
            f"{near} of {len(held)}",
        ),
    ]


def markdown(results: Mapping[str, Any], calibrated: Sequence[Held], by_formula: Sequence[Held], command: str) -> str:
    """Everything between the markers of the page."""
    machine, versions = results["machine"], results["versions"]
    where = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}"
    lines = [f"`{command}`", "", f"{where}; {', '.join(f'{k} {v}' for k, v in versions.items())}.", ""]
    lines += ["### Held-out cells, each link calibrated", "", *_checks(calibrated), ""]
    lines += ["By method, predicted / measured - 1, all cells:", "", *_by_method(calibrated), ""]
    lines += ["By link, median error of its cells:", "", *_by_link(calibrated), ""]
    lines += ["### The same cells by the formulas, from rate and delay alone", "", *_checks(by_formula), ""]
    lines += ["By method:", "", *_by_method(by_formula), ""]
    lines += [
        "### Verdicts",
        "",
        f"A method is worth it from {CLEAR}x the better dense one; within that, either way, the plan says tie. A tie is right"
        f" where the better dense one and the best method were measured within {100 * (NEAR - 1):.0f}% of each other.",
        "",
        *_verdicts(calibrated),
        "",
    ]
    lines += ["### Lines through the collectives", "", *_fits(results["links"])]
    return "\n".join(lines) + "\n"


def _checks(held: Sequence[Held]) -> list[str]:
    words = {True: "pass", False: "**fail**"}
    return table(("claim", "", "found"), ((c, words[ok], n) for c, ok, n in checks(held)), align="l")


def _by_method(held: Sequence[Held]) -> list[str]:
    rows = []
    for name in held[0].measured:
        errors = [one.errors[name] for one in held]
        cells = (min(errors), statistics.median(errors), max(errors))
        sizes = statistics.median(abs(e) for e in errors)
        rows.append((name, *(f"{100 * e:+.0f}%" for e in cells), f"{100 * sizes:.0f}%"))
    return table(("method", "least", "median", "most", "median of sizes"), rows, align="lr")


def _by_link(held: Sequence[Held]) -> list[str]:
    links: dict[str, list[float]] = {}
    for one in held:
        where = ", ".join(one.key.split(", ")[2:])
        links.setdefault(where, []).extend(abs(e) for e in one.errors.values())
    rows = ((k, f"{100 * statistics.median(v):.0f}%", f"{100 * max(v):.0f}%") for k, v in links.items())
    return table(("link", "median", "largest"), rows, align="lr")


def _verdicts(held: Sequence[Held]) -> list[str]:
    rows = [
        (
            one.key,
            "tie" if one.tie else one.choice,
            choose(one.measured),
            f"{gain_of(one.measured):.2f}",
            f"{one.slower:.2f}",
            "right" if one.right else "**wrong**",
        )
        for one in held
    ]
    heads = ("cell", "plan", "measured", "dense / best method", "plan's choice / fastest", "")
    return table(heads, rows, align="lllrrl")


def _fits(links: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for one in sorted(links, key=lambda c: (c["workers"], as_read(c), c["pause_s"])):
        where = f"{rate_name(one['rate'])}, {delay_name(one['delay_s'])}"
        for kind, fit in one["calibration"]["fits"].items():
            rate = f"{1e-6 / fit['beta_s_per_byte']:.3g}" if fit["beta_s_per_byte"] else "-"
            off = f"{100 * fit['median_error']:.0f}%, {100 * fit['worst_error']:.0f}%"
            pause = f"{1e3 * one['pause_s']:.0f}"
            rows.append((one["workers"], where, pause, kind, f"{1e3 * fit['alpha_s']:.3g}", rate, off))
    heads = ("workers", "link", "pauses, ms", "collective", "latency, ms", "MB/s sent")
    return table((*heads, "error of the line: median, largest"), rows, align="rlrlr")
