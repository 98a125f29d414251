"""Pictures: the gap to dense AdamW against bytes, and against the steps of a run."""

import io
import statistics
from collections.abc import Mapping, Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks import pareto
from benchmarks.adamw.runs import Results
from benchmarks.adamw.table import BASELINE, gaps
from benchmarks.pareto import Point
from gradcomp_jax.cli.colours import COLOURS

Sizes = Mapping[str, Mapping[str, float]]


def frontier(found: Results, fewer: Mapping[str, float], steps: int) -> list[str]:
    """Returns the methods that no other beats in both: smaller gap, fewer bytes; those that send most first.

    Args:
        found: the runs.
        fewer: how many times fewer bytes than bfloat16, by method.
        steps: of the runs that count.
    """
    runs = {name: values for name in fewer if (values := gaps(name, steps, found))}
    points = [Point.of(name, 1 / fewer[name], values) for name, values in runs.items()]
    return [point.name for point in pareto.frontier(points, more_is_better=False)][::-1]


HIGHEST = 8.0
"""Gaps in percent that the picture shows at most, so that small ones can be told apart."""


def gap_by_bytes(found: Results, fewer: Mapping[str, float], lengths: Sequence[int], title: str) -> bytes:
    """Returns a PNG: a point for each method, its seeds as a bar, a line through the frontier, whose methods have names.

    Args:
        found: the runs.
        fewer: how many times fewer bytes than bfloat16, by method.
        lengths: of the runs, one colour each.
        title: of the picture.
    """
    figure = Figure(figsize=(8.4, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    largest = 0.0
    for number, (steps, colour) in enumerate(zip(lengths, COLOURS, strict=False)):
        best = frontier(found, fewer, steps)
        for name, ratio in fewer.items():
            values = [100 * gap for gap in gaps(name, steps, found)]
            if not values or name == BASELINE:
                continue
            mean = statistics.fmean(values)
            bars = [[mean - min(values)], [max(values) - mean]]
            faint = 1.0 if name in best else 0.3
            axes.errorbar(
                ratio, mean, yerr=bars, color=colour, alpha=faint, marker="o", markersize=6, capsize=3, lw=1.2
            )
        points = [(fewer[n], 100 * statistics.fmean(gaps(n, steps, found)), n) for n in best if n != BASELINE]
        line = ([x for x, _, _ in points], [y for _, y, _ in points])
        axes.plot(*line, color=colour, lw=1.2, label=f"after {steps:,} steps")
        for i, (x, y, name) in enumerate(points):
            # Names of the longest runs stand below their points, at two heights; those of the others above and to the left.
            place = (
                {"xytext": (-7, 4), "ha": "right"} if number else {"xytext": (0, -14 - 11 * (i % 2)), "ha": "center"}
            )
            axes.annotate(name, (x, y), textcoords="offset points", fontsize=8, color=colour, **place)
        largest = max([largest, *line[1]])
    axes.axhline(0, color="0.4", lw=0.8)
    axes.set(xscale="log", xlabel="times fewer bytes than dense bfloat16", ylabel="loss above dense AdamW's (%)")
    # What is far above the frontier is in the table.
    top = 1.25 * min(max(largest, 1.0), HIGHEST)
    axes.set_ylim(min(axes.get_ylim()[0], -0.12 * top), top)
    axes.set_xlim(1.5, 1.6 * max(fewer.values()))
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, frameon=False, loc="upper left")
    axes.set_title(title, fontsize=9)
    return _png(figure)


def gap_by_steps(found: Results, names: list[str], title: str) -> bytes:
    """Returns a PNG: the gap of each of some methods against the steps of the whole run."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, name in enumerate(names):
        line = [(n, [100 * gap for gap in gaps(name, n, found)]) for n in sorted(found.task.lengths)]
        line = [(n, values) for n, values in line if values]
        means = [statistics.fmean(values) for _, values in line]
        bars = [
            [m - min(v) for m, (_, v) in zip(means, line, strict=True)],
            [max(v) - m for m, (_, v) in zip(means, line, strict=True)],
        ]
        colour = COLOURS[number % len(COLOURS)]
        axes.errorbar([n for n, _ in line], means, yerr=bars, color=colour, marker="o", capsize=3, lw=1.4, label=name)
    axes.axhline(0, color="0.4", lw=0.8)
    axes.set(xscale="log", xlabel="steps of the run", ylabel="loss above dense AdamW's (%)")
    axes.set_xticks(sorted(found.task.lengths), [f"{n:,}" for n in sorted(found.task.lengths)])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(title, fontsize=9)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
