"""Pictures of seconds to a loss: curves against seconds, and a map of where a method is faster than the best dense one."""

import io
import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.sweep.links import rate_name
from benchmarks.training.curves import Curves
from benchmarks.training.time_to_loss import Composed
from gradcomp_jax.cli.colours import COLOURS

_OTHERS = "0.82"
_MOST = 5.0
"""Ratios from a 32nd to 32 have colours of their own."""


def curves(found: Composed) -> bytes:
    """Returns a PNG: the mean metric against seconds, a panel for each link.

    Where there are more methods than colours, those have one that are the fastest to what they end at over some link.
    """
    columns = 2 if len(found.rates) > 1 else 1
    rows = math.ceil(len(found.rates) / columns)
    figure = Figure(figsize=(6 * columns, 4.2 * rows + 1), layout="constrained")
    FigureCanvasAgg(figure)
    panels = np.ravel(figure.subplots(rows, columns, squeeze=False))
    named = list(found.curves) if len(found.curves) <= len(COLOURS) else found.fastest()
    others = [one for one in found.curves if one not in named]
    for panel, rate in zip(panels, found.rates, strict=False):

        def draw(one: Curves, panel: Axes = panel, rate: float = rate, **style: Any) -> None:
            second = one.steps * found.seconds[one.name, rate].total
            panel.plot([second * (i + 1) for i in range(one.epochs)], one.mean, **style)

        for number, one in enumerate(named):
            width, style = (2.6 if one is found.dense else 1.5), ("-" if number < len(COLOURS) else "--")
            colour = COLOURS[number % len(COLOURS)]
            draw(one, color=colour, ls=style, lw=width, marker="o", markersize=2.5, label=one.name)
        for number, one in enumerate(others):
            label = f"{len(others)} others: another is faster" if number == 0 else "_"
            draw(one, color=_OTHERS, lw=0.8, zorder=1, label=label)
        panel.axhline(found.target, color="0.6", lw=0.8, ls="--", zorder=0)
        panel.set(xscale="log", title=rate_name(rate), xlabel="seconds (composed)", ylabel=found.dense.metric)
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.25)
    for panel in panels[len(found.rates) :]:
        panel.remove()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    figure.suptitle(
        f"{found.dense.task}, {found.dense.workers} workers; dashed: what {found.dense.name} ends at, and"
        f" {100 * found.tolerance:g}%"
    )
    return _png(figure)


def ratios(found: Composed) -> bytes:
    """Returns a PNG: by method and link, seconds to the target over those of the best dense baseline, in colour and figures."""
    methods = [one for one in found.curves if one is not found.dense]
    values = np.array([[found.ratio(one, rate) for rate in found.rates] for one in methods])
    there = np.isfinite(values)
    shown = np.where(there, np.clip(np.log2(np.where(there, values, 1.0)), -_MOST, _MOST), np.nan)
    figure = Figure(figsize=(2.5 + 1.5 * len(found.rates), 1.6 + 0.42 * len(methods)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(np.ma.masked_invalid(shown), cmap="RdBu_r", vmin=-_MOST, vmax=_MOST, aspect="auto")
    axes.set_facecolor("0.35")
    for (i, j), reached in np.ndenumerate(there):
        text = f"{values[i, j]:.2f}x" if reached else f"> {found.more_than(methods[i], found.rates[j]):.2f}x"
        dark = not reached or abs(shown[i, j]) > 0.6 * _MOST
        axes.text(j, i, text, ha="center", va="center", fontsize=9, color="white" if dark else "black")
    axes.set_xticks(range(len(found.rates)), [rate_name(rate) for rate in found.rates])
    axes.set_yticks(range(len(methods)), [one.name for one in methods])
    axes.set_title(
        f"Seconds to what {found.dense.name} ends at, and {100 * found.tolerance:g}%, over its own (composed):\n"
        "blue is faster, red is slower, grey is not there by the end of its runs",
        fontsize=9,
    )
    bar = figure.colorbar(image, ax=axes, ticks=range(-int(_MOST), int(_MOST) + 1))
    bar.ax.set_yticklabels([f"{2.0**k:g}x" for k in range(-int(_MOST), int(_MOST) + 1)])
    return _png(figure)


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, dpi=110)
    return file.getvalue()
