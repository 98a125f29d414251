"""The picture of ``errors.py``: error over bits for each value, one panel for each input."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from error_subjects import Code

from gradcomp_jax.cli.colours import COLOURS

PUBLISHED = {1: 0.571, 2: 0.133, 3: 0.036, 4: 0.0096}
"""Error of unbiased DRIVE and EDEN by bits: Vargaftik et al., 2022, https://arxiv.org/abs/2108.08842."""

# Okabe and Ito's colours, which colour-blind readers can tell apart, a grey and a purple. Hollow markers are unbiased codes.
_BLUE, _RED, _GREEN, _PINK, _ORANGE, _SKY = COLOURS[:6]
_GREY, _PURPLE = "#6F6F6F", "#5B2A86"
_STYLES: dict[str, tuple[str, str, bool]] = {
    "bfloat16": ("black", "s", True),
    "float8": ("black", "P", True),
    "fixed point": ("black", "X", False),
    "integers, max, nearest": (_BLUE, "o", True),
    "integers, max, stochastic": (_BLUE, "o", False),
    "integers, l2, nearest": (_SKY, "v", True),
    "integers, l2, stochastic": (_SKY, "v", False),
    "powers of two, nearest": (_PURPLE, ">", True),
    "powers of two, stochastic": (_PURPLE, ">", False),
    "matrix units": (_ORANGE, "s", True),
    "ternary": (_ORANGE, "^", False),
    "rotated, unbiased": (_RED, "D", False),
    "rotated, biased": (_RED, "D", True),
    "sign": (_PURPLE, "d", True),
    "low rank": (_PINK, "h", True),
    "top-k, bfloat16": (_GREEN, "s", True),
    "top-k, int8": (_GREEN, "p", True),
    "top-k of frequencies": (_GREEN, "*", True),
    "random-k": (_GREY, "<", True),
    "random-k, rescaled": (_GREY, "<", False),
}
_TITLES = {
    "Gaussian": "Gaussian input",
    "Student t": "Heavy-tailed input: Student t, 3 degrees of freedom",
    "gradients": "Gradients: a conv net, training on digits",
}
_X, _Y = (0.012, 22), (1e-6, 4e3)


def plot(codes: Sequence[Code], table: dict[str, dict[str, Any]], path: Path) -> None:
    """Writes a PNG. ``table``: what ``errors.measure`` returned, by the code's name and the input's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(3, 1, figsize=(11, 18), sharex=True, sharey=True, layout="constrained")
    figure.get_layout_engine().set(hspace=0.04)
    for axes, (name, title) in zip(panels, _TITLES.items(), strict=True):
        # The corner below the bound is empty: there, once more and linear, what a logarithm presses together.
        inset = axes.inset_axes((0.05, 0.085, 0.5, 0.415))
        for each in (axes, inset):
            _bound(each, own=name == "Gaussian")
            for family, style in _STYLES.items():
                members = [code for code in codes if code.family == family]
                _family(each, family, style, [table[code.name][name] for code in members], line=members[0].ordered)
        _remarks(axes)
        for family in _STYLES:
            _below(axes, family, [table[code.name][name] for code in codes if code.family == family])
        inset.set(xscale="log", xlim=(_X[0], 2.3), ylim=(0.2, 1.04))
        inset.set_title("below 1, linear", fontsize=10, loc="left")
        inset.set_xticks([0.03, 0.1, 0.3, 1, 2], ["0.03", "0.1", "0.3", "1", "2"], fontsize=9)
        inset.tick_params(axis="x", which="minor", bottom=False)
        inset.tick_params(axis="y", labelsize=9)
        inset.grid(alpha=0.25, linewidth=0.6)
        axes.set(xscale="log", yscale="log", xlim=_X, ylim=_Y, ylabel="normalised mean square error")
        axes.set_title(title, fontsize=13, loc="left")
        axes.set_xticks([0.03, 0.1, 0.3, 1, 2, 4, 8, 16], ["0.03", "0.1", "0.3", "1", "2", "4", "8", "16"])
        axes.tick_params(axis="x", which="minor", bottom=False)
        axes.tick_params(labelbottom=True)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("bits for each value on the wire, scales and indices included", fontsize=12)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=11,
        title="hollow: stochastic or unbiased; bars: one standard deviation upwards",
    )
    figure.savefig(path, dpi=110)


def _bound(axes: Any, *, own: bool) -> None:
    """The bound, which is one for Gaussian input alone, the error of sending nothing, and what others measured."""
    bits = np.geomspace(*_X, 400)
    axes.plot(bits, 4.0**-bits, color="black", linewidth=1.8 if own else 1.0, linestyle="-" if own else ":")
    axes.axhline(1, color="black", linewidth=0.9, linestyle="--", alpha=0.7)
    if own:
        axes.plot(list(PUBLISHED), list(PUBLISHED.values()), "k+", markersize=16, label="rotated, unbiased: published")


def _remarks(axes: Any) -> None:
    at = (6.2, 4**-6.2)
    axes.annotate("Gaussian bound, $4^{-b}$", at, (-6, -8), textcoords="offset points", ha="right", fontsize=11)
    axes.annotate("sending nothing", (_X[1], 1), (0, 4), textcoords="offset points", ha="right", fontsize=10)


def _below(axes: Any, label: str, points: Sequence[Any]) -> None:
    """Says what lies below the panel."""
    for one in points:
        if one.mean < _Y[0]:
            exponent = np.floor(np.log10(one.mean))
            text = f"{label}\nlies below,\nat ${one.mean / 10**exponent:.1f}\\cdot 10^{{{exponent:.0f}}}$"
            axes.annotate(text, (_X[1], 6e-6), ha="right", va="bottom", fontsize=9)


def _family(axes: Any, label: str, style: tuple[str, str, bool], points: Sequence[Any], *, line: bool) -> None:
    colour, marker, filled = style
    points = sorted(points, key=lambda one: one.mean_bits)
    # Downwards a standard deviation may reach below zero, which a logarithm does not.
    up = [one.spread for one in points]
    axes.errorbar(
        [one.mean_bits for one in points],
        [one.mean for one in points],
        yerr=[[0.0] * len(up), up],
        color=colour,
        marker=marker,
        markersize=11 if marker == "*" else 7.5,
        markerfacecolor=colour if filled else "white",
        markeredgewidth=1.3,
        linewidth=1.0 if line else 0,
        elinewidth=1.0,
        capsize=2.5,
        label=label,
    )
