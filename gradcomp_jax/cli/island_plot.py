"""A run of islands as a picture: who took part in which round, and below it what the islands themselves have noted."""

import io
import itertools
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogFormatter, MaxNLocator

from gradcomp_jax.cli.colours import COLOURS
from gradcomp_jax.experiments.island import Landed
from gradcomp_jax.islands import Decision

_SHADES = ("#9ECAE1", "#6BAED6", "#4292C6", "#2171B5", "#084594")
"""Of one hue, from light to dark: brightness alone tells them apart."""
_ONE_SHADE, _ABSENT = "#4292C6", "#A6A6A6"
_MOST_WEIGHTS = 5
_FEWEST_COLUMNS = 10
_DASHES = ("-", "--", "-.", ":")
_MOST_MARKED = 60
"""Rounds up to which a line shows where its points are."""


class _Short(LogFormatter):
    """Writes 0.2 and not 2e-01 on an axis too short for powers of ten."""

    def _num_to_string(self, x: float, vmin: float, vmax: float) -> str:
        return f"{x:g}"


def picture_of(decisions: Sequence[Decision], landed: Sequence[Landed], name: str) -> bytes:
    """Returns the picture of a run as a PNG file."""
    file = io.BytesIO()
    draw(decisions, landed, name).savefig(file, dpi=140)
    return file.getvalue()


def draw(decisions: Sequence[Decision], landed: Sequence[Landed], name: str) -> Figure:
    """Draws a row for each island and a column for each round; below it, from metrics, the loss and the residual by round.

    Args:
        decisions: of all rounds, at least one.
        landed: metrics of some of the islands, in the order of their files.
        name: of the run.
    """
    seen = {island for d in decisions for island in (*d.members, *(e.island for e in d.entries))}
    islands = sorted(seen | {line.island for line in landed})
    panels = 2 if landed else 0
    heights = [0.42 * len(islands) + 0.3, *([1.9] * panels)]
    width = min(max(7.5, 3.2 + 0.2 * len(decisions)), 14)
    figure = Figure(figsize=(width, sum(heights) + 1.5), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1 + panels, 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    handles = _draw_rounds(all_axes[0], decisions, islands)
    if landed:
        own = {island: [line for line in landed if line.island == island] for island in islands}
        looks = dict(zip(islands, itertools.cycle(itertools.product(_DASHES, COLOURS)), strict=False))
        own = {island: lines for island, lines in own.items() if lines}
        marker = "o" if len(decisions) <= _MOST_MARKED else None
        for island, lines in own.items():
            dashes, colour = looks[island]
            style: dict[str, Any] = {"color": colour, "linestyle": dashes, "linewidth": 1.6}
            _draw_line(all_axes[1], lines, "loss", style | {"marker": marker, "markersize": 3})
            _draw_line(all_axes[2], lines, "kept_norm", style | {"marker": marker, "markersize": 3})
            handles.append(Line2D([], [], **style, label=island))
        for axes, label in zip(all_axes[1:], ("training loss", "norm of the residual"), strict=True):
            axes.set(ylabel=label)
            values = [value for line in axes.lines for value in line.get_ydata() if not math.isnan(value)]
            if values and max(values) > 0:
                # An island that has just begun keeps nothing, and a logarithm has no place for that.
                axes.set_yscale("log", nonpositive="mask")
                axes.yaxis.set_major_formatter(_Short())
                axes.yaxis.set_minor_formatter(_Short(minor_thresholds=(1.5, 0.6)))
            axes.grid(alpha=0.25)
        figure.align_ylabels(list(all_axes[1:]))
    last = all_axes[-1]
    last.set(xlabel="round")
    last.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
    if landed:
        # The cells need no line below them.
        all_axes[0].spines["bottom"].set_visible(False)
        all_axes[0].tick_params(axis="x", length=0)
    rounds, count = len(decisions), len(islands)
    figure.suptitle(
        f"{name}: {rounds} round{'s' if rounds > 1 else ''}, {count} island{'s' if count > 1 else ''}",
        x=0.01,
        ha="left",
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=6 if width > 9 else 3, frameon=False, fontsize=9)
    return figure


def _draw_rounds(axes: Axes, decisions: Sequence[Decision], islands: Sequence[str]) -> list[Patch | Line2D]:
    """Fills a cell for each payload that was accepted, and outlines one where an island was alive without; returns a legend."""
    weights = sorted({entry.weight for d in decisions for entry in d.entries})
    shades = _shades(weights)
    cells, fills, edges = [], [], []
    accepted = dict.fromkeys(islands, 0)
    for decision in decisions:
        entries = {entry.island: entry.weight for entry in decision.entries}
        for island in sorted(entries.keys() | decision.members):
            corner = decision.round - 0.42, islands.index(island) - 0.36
            cells.append(Rectangle(corner, 0.84, 0.72))
            filled = island in entries
            fills.append(shades[entries[island]] if filled else "none")
            edges.append(shades[entries[island]] if filled else _ABSENT)
            accepted[island] += filled
    width = 0.8 if len(decisions) <= 150 else 0.3
    axes.add_collection(PatchCollection(cells, facecolors=fills, edgecolors=edges, linewidths=width))
    axes.set(xlim=(0.3, max(len(decisions), _FEWEST_COLUMNS) + 0.7), ylim=(len(islands) - 0.4, -0.6))
    axes.set_yticks(range(len(islands)), islands)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    for row, island in enumerate(islands):
        label = f"{accepted[island]} of {len(decisions)}"
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (4, 0), "textcoords": "offset points"}
        axes.annotate(label, (1, row), **place, va="center", fontsize=9)
    shown = weights if len(weights) <= _MOST_WEIGHTS else [weights[0], weights[-1]]
    handles: list[Patch | Line2D] = [
        Patch(color=shades[w], label="accepted" if len(weights) == 1 else f"accepted, weight {w:g}") for w in shown
    ]
    if "none" in fills:
        handles.append(Patch(facecolor="none", edgecolor=_ABSENT, label="alive, not in the round"))
    return handles


def _shades(weights: Sequence[float]) -> dict[float, str]:
    """Gives darker shades to larger weights."""
    if len(weights) == 1:
        return {weights[0]: _ONE_SHADE}
    last = len(_SHADES) - 1
    if len(weights) <= len(_SHADES):
        return {w: _SHADES[round(i * last / (len(weights) - 1))] for i, w in enumerate(weights)}
    low, high = math.log(weights[0]), math.log(weights[-1])
    return {w: _SHADES[round(last * (math.log(w) - low) / (high - low))] for w in weights}


def _draw_line(axes: Axes, lines: Sequence[Landed], field: str, style: dict[str, Any]) -> None:
    """Draws a field by round, with a gap where another process of the island has begun."""
    x, y = [], []
    for before, line in zip([None, *lines], lines, strict=False):
        if before is not None and line.seconds < before.seconds:
            x.append(line.round)
            y.append(math.nan)
        value = getattr(line, field)
        x.append(line.round)
        y.append(math.nan if value is None else value)
    axes.plot(x, y, **style)
