"""Pictures: the gap to dense AdamW against bytes, and against the steps of a run."""

import io
import itertools
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import Bbox

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
    named: list[tuple[str, float, float, str]] = []
    drawn: list[Sequence[tuple[float, float]]] = []  # lines, of which a bar and a point are some
    for steps, colour in zip(lengths, COLOURS, strict=False):
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
            drawn.append([(ratio, min(values)), (ratio, max(values))])
        points = [(fewer[n], 100 * statistics.fmean(gaps(n, steps, found)), n) for n in best if n != BASELINE]
        line = ([x for x, _, _ in points], [y for _, y, _ in points])
        axes.plot(*line, color=colour, lw=1.2, label=f"after {steps:,} steps")
        drawn.append(list(zip(*line, strict=True)))
        named += [(name, x, y, colour) for x, y, name in points]
        largest = max([largest, *line[1]])
    axes.axhline(0, color="0.4", lw=0.8)
    axes.set(xscale="log", xlabel="times fewer bytes than dense bfloat16", ylabel="loss above dense AdamW's (%)")
    # What is far above the frontier is in the table.
    top = 1.25 * min(max(largest, 1.0), HIGHEST)
    axes.set_ylim(min(axes.get_ylim()[0], -0.12 * top), top)
    ends = (1.5, 3 * max(fewer.values()))  # names have room on the right
    axes.set_xlim(ends)
    drawn.append([(x, 0) for x in ends])
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, frameon=False, loc="upper left")
    axes.set_title(title, fontsize=9)
    _write_names(axes, named, drawn)
    return _png(figure)


_PLACES = [(8 * x, 5 * y) for y in (1, -1, 2, -2, 3, -3, 4, -4) for x in (-1, 1)] + [(0, 10), (0, -10)]
"""Where a name may stand beside its point, in points to the right and upwards; of equals the first."""


def _write_names(
    axes: Axes, named: Sequence[tuple[str, float, float, str]], drawn: Sequence[Sequence[tuple[float, float]]]
) -> None:
    """Writes each name where it covers least of what is drawn and of the names before it.

    Args:
        axes: with their limits.
        named: name, place in data and colour of each.
        drawn: lines in data that names should not cover.
    """
    axes.figure.draw_without_rendering()  # settles the layout, and with it where data lie
    taken = []
    for line in drawn:
        ends = axes.transData.transform(line)
        for a, b in itertools.pairwise(ends):
            steps = np.linspace(a, b, 1 + int(np.hypot(*(b - a)) / 6))
            taken += [Bbox([point - 5, point + 5]) for point in steps]
    for name, x, y, colour in named:
        text = axes.annotate(name, (x, y), (0, 0), textcoords="offset points", fontsize=8, color=colour)

        def move(place: tuple[int, int], text: Annotation = text) -> Bbox:
            right, up = place
            text.set(position=place, ha=("right", "center", "left")[(right > 0) - (right < 0) + 1])
            text.set_va("center" if right else "bottom" if up > 0 else "top")
            return text.get_window_extent()

        def covered(place: tuple[int, int]) -> float:
            box = move(place)
            inside = Bbox.intersection(box, axes.bbox)
            outside = box.width * box.height - (inside.width * inside.height if inside else 0.0)
            shared = [found for other in taken if (found := Bbox.intersection(box, other))]
            return 10 * outside + sum(found.width * found.height for found in shared)

        taken.append(move(min(_PLACES, key=covered)))


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
