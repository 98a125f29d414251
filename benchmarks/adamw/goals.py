"""What the protocol is to show: how many times fewer bytes at what gap, and the nearest row."""

import dataclasses
import math
import statistics
from collections.abc import Mapping

from benchmarks.adamw import table
from benchmarks.adamw.rows import ROWS
from benchmarks.adamw.runs import Results
from gradcomp_jax import _markdown


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """A gap to reach.

    Attributes:
      fewer: times fewer bytes than bfloat16, at least.
      gap: above dense AdamW, at most, as a fraction.
      steps: of the run.
      outer: whether workers may exchange less often than in every step.
    """

    fewer: float
    gap: float
    steps: int = 16_000
    outer: bool = False


GOALS = (
    Goal(10, 0.0),
    Goal(50, 0.002),
    Goal(100, 0.007),
    Goal(200, 0.015),
    Goal(100, 0.01, outer=True),
    Goal(40, 0.015, steps=4_000),
    Goal(50, 0.01, steps=2_100),
    Goal(50, 0.01, steps=2_100, outer=True),
)
"""Each for the tasks that have runs of its length."""

SEEDS = 3
"""Seeds that a goal needs at least."""
P = 0.05


def nearest(goal: Goal, found: Results, fewer: Mapping[str, float]) -> tuple[str, list[float]] | None:
    """Returns the row of the least mean gap among those that send so little, the rows of most seeds first, and its gaps."""
    rows = {
        name: values
        for name, ratio in fewer.items()
        if ratio >= goal.fewer and (ROWS[name].every > 1) == goal.outer
        if (values := table.gaps(name, goal.steps, found)) and name != table.BASELINE
    }
    if not rows:
        return None
    return min(rows.items(), key=lambda row: (len(row[1]) < SEEDS, statistics.fmean(row[1])))


def verdict(goal: Goal, values: list[float], p: float) -> str:
    """Returns whether a mean gap is at most the goal's and p small enough; of few seeds, what is missing."""
    if len(values) < SEEDS:
        return f"{len(values)} of {SEEDS} seeds"
    if statistics.fmean(values) > goal.gap:
        return "missed"
    return "met" if p < P else "missed: p"


def goals(found: Results, fewer: Mapping[str, float]) -> str:
    """Returns a row for each goal; p is that of a gap of 1% or more, or of the goal's where that is larger."""
    lines = []
    for goal in (goal for goal in GOALS if goal.steps in found.task.lengths):
        how = "outer steps" if goal.outer else "every step"
        said = [f"{goal.fewer:g}x", f"{100 * goal.gap:g}%", f"{goal.steps:,}", how]
        best = nearest(goal, found, fewer)
        if best is None:
            lines.append((*said, "-", "-", "-", "-", "not run"))
            continue
        name, values = best
        p = table.p_no_worse(values, max(goal.gap, table.NO_WORSE_THAN))
        lines.append(
            (
                *said,
                name,
                f"{_markdown.figure(fewer[name])}x",
                table.with_spread([100 * value for value in values], "{:+.2f}") + "%",
                "-" if math.isnan(p) else f"{p:.2g}",
                verdict(goal, values, p),
            )
        )
    header = ("fewer bytes", "gap at most", "steps", "exchange", "nearest row", "sends fewer", "gap", "p", "verdict")
    return "\n".join(_markdown.table(header, lines, align="lr"))
