"""Pictures: the gap to dense AdamW against bytes, and against the steps of a run."""

import io
import statistics
from collections.abc import Mapping

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.adamw.runs import LENGTHS, Results
from benchmarks.adamw.table import BASELINE, gaps
from gradcomp_jax.cli.colours import COLOURS

Sizes = Mapping[str, Mapping[str, float]]


def frontier(found: Results, fewer: Mapping[str, float], steps: int) -> list[str]:
    """Returns the methods that no other beats in both: smaller gap, fewer bytes; those that send most first.

    Args:
        found: the runs.
        fewer: how many times fewer bytes than bfloat16, by method.
        steps: of the runs that count.
    """
    best, kept = float("inf"), []
    for name in sorted(fewer, key=lambda n: -fewer[n]):
        values = gaps(name, steps, found)
        if values and statistics.fmean(values) < best:
            best = statistics.fmean(values)
            kept.append(name)
    return kept[::-1]


def gap_by_bytes(found: Results, fewer: Mapping[str, float], steps: int, title: str) -> bytes:
    """Returns a PNG: a point for each method, its seeds as a bar; those of the frontier have names."""
    figure = Figure(figsize=(8.4, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    best = frontier(found, fewer, steps)
    for name, ratio in fewer.items():
        values = [100 * gap for gap in gaps(name, steps, found)]
        if not values or name == BASELINE:
            continue
        mean, colour = statistics.fmean(values), COLOURS[0] if name in best else "0.7"
        bars = [[mean - min(values)], [max(values) - mean]]
        axes.errorbar(ratio, mean, yerr=bars, color=colour, marker="o", markersize=6, capsize=3, lw=1.2)
    points = [(fewer[n], 100 * statistics.fmean(gaps(n, steps, found)), n) for n in best if n != BASELINE]
    axes.plot([x for x, _, _ in points], [y for _, y, _ in points], color=COLOURS[0], lw=0.8, alpha=0.5)
    for x, y, name in points:
        axes.annotate(name, (x, y), xytext=(6, -11), textcoords="offset points", fontsize=8)
    axes.axhline(0, color="0.4", lw=0.8)
    axes.axhspan(0, 1, color=COLOURS[1], alpha=0.1, lw=0)
    axes.set(xscale="log", xlabel="times fewer bytes than dense bfloat16", ylabel="loss above dense AdamW's (%)")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=9)
    return _png(figure)


def gap_by_steps(found: Results, names: list[str], title: str) -> bytes:
    """Returns a PNG: the gap of each of some methods against the steps of the whole run."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, name in enumerate(names):
        line = [(n, [100 * gap for gap in gaps(name, n, found)]) for n in sorted(LENGTHS)]
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
    axes.set_xticks(sorted(LENGTHS), [f"{n:,}" for n in sorted(LENGTHS)])
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
