"""The curves of a comparison as one picture."""

import pathlib
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gradcomp_jax.cli.colours import COLOURS
from gradcomp_jax.cli.report import title
from gradcomp_jax.experiments import Comparison, MethodResult

_DASHES = ("-", "--", "-.")


def save_plot(comparison: Comparison, path: pathlib.Path) -> None:
    """Writes the picture of a comparison to a PNG file, over what is there."""
    draw(comparison).savefig(path, dpi=140)


def draw(comparison: Comparison) -> Figure:
    """Draws loss, test accuracy, and accuracy against bytes; mean and band over the seeds."""
    figure = Figure(figsize=(14, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    loss, accuracy, cost = figure.subplots(1, 3)
    for number, result in enumerate(comparison.methods):
        style = {"color": COLOURS[number % len(COLOURS)], "linestyle": _DASHES[(number // len(COLOURS)) % len(_DASHES)]}
        _draw_loss(loss, result, style)
        _draw_accuracy(accuracy, result, style)
        cost.errorbar(
            max(result.wire.sent, 1),
            100 * result.accuracy_mean,
            yerr=100 * result.accuracy_std,
            color=style["color"],
            marker="o",
            markersize=7,
            capsize=4,
        )
    loss.set(xlabel="epoch", ylabel="training loss (nats)", yscale="log", title="Training loss")
    accuracy.set(xlabel="epoch", ylabel="test accuracy (%)", title="Test accuracy")
    accuracy.set_ylim(*_accuracy_limits(comparison))
    cost.set(
        xlabel="bytes that one device sends in a step",
        xscale="log",
        ylabel="final test accuracy (%)",
        title="What it costs",
    )
    for axes in (loss, accuracy):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (loss, accuracy, cost):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title(comparison))
    handles, labels = accuracy.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False)
    return figure


def _draw_loss(axes: Axes, result: MethodResult, style: dict[str, Any]) -> None:
    runs = np.array([run.loss for run in result.runs])
    per_epoch = max(runs.shape[1] // len(result.runs[0].accuracy), 1)
    window = max(min(per_epoch // 2, runs.shape[1]), 1)
    # Single batches are noisy: a running mean over half an epoch.
    kernel = np.full(window, 1.0 / window)
    smooth = np.stack([np.convolve(run, kernel, mode="valid") for run in runs])
    epochs = (np.arange(smooth.shape[1]) + window) / per_epoch
    _line_and_band(axes, epochs, smooth, style, label=result.method)


def _draw_accuracy(axes: Axes, result: MethodResult, style: dict[str, Any]) -> None:
    runs = 100 * np.array([run.accuracy for run in result.runs])
    label = f"{result.method}: {100 * result.accuracy_mean:.1f}%, {result.ratio_f32:.0f}x fewer bytes than f32"
    _line_and_band(axes, np.arange(1, runs.shape[1] + 1), runs, style, label=label)


def _line_and_band(axes: Axes, x: np.ndarray, runs: np.ndarray, style: dict[str, Any], label: str) -> None:
    mean, spread = runs.mean(axis=0), runs.std(axis=0)
    marker = "o" if len(x) < 3 else None
    axes.plot(x, mean, label=label, linewidth=1.8, marker=marker, **style)
    low = np.maximum(mean - spread, runs.min(axis=0))
    axes.fill_between(x, low, mean + spread, color=style["color"], alpha=0.15, linewidth=0)


def _accuracy_limits(comparison: Comparison) -> tuple[float, float]:
    """Leaves out the steep beginning, where all methods climb alike."""
    runs = [run.accuracy for result in comparison.methods for run in result.runs]
    settled = [value for accuracy in runs for value in accuracy[len(accuracy) // 4 :]]
    highest = max(max(accuracy) for accuracy in runs)
    lowest = float(np.percentile(settled, 2))
    margin = max(0.15 * (highest - lowest), 0.005)
    return 100 * max(lowest - margin, 0.0), 100 * min(highest + margin, 1.0)
