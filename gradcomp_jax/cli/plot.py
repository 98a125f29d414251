"""The curves of a comparison as one picture."""

import io
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from gradcomp_jax.cli.colours import COLOURS
from gradcomp_jax.cli.report import title
from gradcomp_jax.experiments import Comparison, MethodResult, Metric, show

_DASHES = ("-", "--", "-.")
_MOST = 1e100


def picture_of(comparison: Comparison) -> bytes:
    """Returns the picture of a comparison as a PNG file."""
    file = io.BytesIO()
    draw(comparison).savefig(file, dpi=140)
    return file.getvalue()


def draw(comparison: Comparison) -> Figure:
    """Draws loss, the metric, and the metric against bytes; mean and band over the seeds.

    Of a run that diverged only what is finite is drawn.
    """
    figure = Figure(figsize=(14, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    loss, judged, cost = figure.subplots(1, 3)
    scale, unit = _scale(comparison.metric)
    for number, result in enumerate(comparison.methods):
        style = {"color": COLOURS[number % len(COLOURS)], "linestyle": _DASHES[(number // len(COLOURS)) % len(_DASHES)]}
        _draw_loss(loss, result, style)
        _draw_metric(judged, result, style)
        cost.errorbar(
            max(result.wire.sent, 1),
            scale * _drawable(result.evaluation_mean),
            yerr=scale * _drawable(result.evaluation_std),
            color=style["color"],
            marker="o",
            markersize=7,
            capsize=4,
        )
    positive = all(value > 0 for line in loss.lines for value in line.get_ydata() if np.isfinite(value))
    drawn = any(np.isfinite(line.get_ydata()).any() for line in loss.lines)
    scale_of_loss = "log" if positive and drawn else "linear"
    loss.set(xlabel="epoch", ylabel="training loss", yscale=scale_of_loss, title="Training loss")
    if scale_of_loss == "log":
        # "2" and not "2 x 10^0" on an axis too short for powers of ten.
        loss.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
    judged.set(xlabel="epoch", ylabel=unit, title=comparison.metric.capitalize())
    limits = _limits(comparison)
    if limits is not None:
        judged.set_ylim(*limits)
    cost.set(
        xlabel="bytes that one device sends in a step", xscale="log", ylabel=f"final {unit}", title="What it costs"
    )
    for axes in (loss, judged):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (loss, judged, cost):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title(comparison))
    handles, labels = judged.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False)
    return figure


def _draw_loss(axes: Axes, result: MethodResult, style: dict[str, Any]) -> None:
    runs = _drawable([run.loss for run in result.runs])
    per_epoch = max(runs.shape[1] // len(result.runs[0].evaluation), 1)
    window = max(min(per_epoch // 2, runs.shape[1]), 1)
    # Single batches are noisy: a running mean over half an epoch.
    kernel = np.full(window, 1.0 / window)
    smooth = np.stack([np.convolve(run, kernel, mode="valid") for run in runs])
    epochs = (np.arange(smooth.shape[1]) + window) / per_epoch
    _line_and_band(axes, epochs, smooth, style, label=result.method)


def _draw_metric(axes: Axes, result: MethodResult, style: dict[str, Any]) -> None:
    metric = result.runs[0].metric
    runs = _scale(metric)[0] * _drawable([run.evaluation for run in result.runs])
    label = f"{result.method}: {show(metric, result.evaluation_mean)}, {result.ratio_f32:.0f}x fewer bytes than f32"
    _line_and_band(axes, np.arange(1, runs.shape[1] + 1), runs, style, label=label)


def _drawable(values: Any) -> np.ndarray:
    """Returns NaN instead of what no axis can hold: infinities, and numbers whose squares are infinite."""
    found = np.asarray(values, float)
    return np.where(np.abs(found) < _MOST, found, np.nan)


def _scale(metric: Metric) -> tuple[float, str]:
    return (100.0, "test accuracy (%)") if metric == "accuracy" else (1.0, metric)


def _line_and_band(axes: Axes, x: np.ndarray, runs: np.ndarray, style: dict[str, Any], label: str) -> None:
    mean, spread = runs.mean(axis=0), runs.std(axis=0)
    marker = "o" if len(x) < 3 else None
    axes.plot(x, mean, label=label, linewidth=1.8, marker=marker, **style)
    low = np.maximum(mean - spread, runs.min(axis=0))
    axes.fill_between(x, low, mean + spread, color=style["color"], alpha=0.15, linewidth=0)


def _limits(comparison: Comparison) -> tuple[float, float] | None:
    """Leaves out the steep beginning, where all methods improve alike; None where nothing is finite."""
    runs = [run.evaluation for result in comparison.methods for run in result.runs]
    settled = _drawable([value for values in runs for value in values[len(values) // 4 :]])
    settled = settled[np.isfinite(settled)]
    if not settled.size:
        return None
    better = max if comparison.metric == "accuracy" else min
    every = _drawable([value for values in runs for value in values])
    best = better(every[np.isfinite(every)])
    worst = float(np.percentile(settled, 2 if comparison.metric == "accuracy" else 98))
    margin = max(0.15 * abs(best - worst), 0.005)
    low, high = sorted((best, worst))
    scale, _ = _scale(comparison.metric)
    if comparison.metric == "accuracy":
        return scale * max(low - margin, 0.0), scale * min(high + margin, 1.0)
    return low - margin, high + margin
