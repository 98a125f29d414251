"""Draws accuracy against bytes from a table that ``gradcomp compare --markdown`` has written.

    python benchmarks/accuracy_plot.py docs/results/digits-all.md docs/results/digits-all.png

No training: the figures are those of the table. Every method of the table is in the picture, those that lose too.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tasks.tasks import TASKS
from gradcomp_jax.cli.colours import COLOURS

ROW = re.compile(r"^\| ([\w-]+) \| ([\d.]+) ± ([\d.]+) \| ([\d,]+) \|", re.MULTILINE)
BASELINES = ("dense", "dense-bf16")


class Point(NamedTuple):
    """One method: mean and standard deviation of its accuracy in percent, and the bytes that a device sends in a step."""

    method: str
    accuracy: float
    deviation: float
    sent: int


def read(page: str) -> tuple[str, list[Point]]:
    """Returns what was trained and how, and the methods, the fewest bytes first.

    Raises:
        ValueError: for a page without such a table.
    """
    points = [Point(m, float(a), float(d), int(b.replace(",", ""))) for m, a, d, b in ROW.findall(page)]
    if not points:
        raise ValueError(
            "no row reads like '| dgc | 97.94 ± 0.58 | 3,969 |': give a page that gradcomp compare has written"
        )
    task, _, settings = page.partition("\n")[0].removeprefix("# ").partition(": ")
    return f"{TASKS[task].summary}\n{settings}", sorted(points, key=lambda point: point.sent)


def draw(title: str, points: list[Point]) -> Figure:
    """Draws one marker a method, with its name; a band is one standard deviation of dense float32."""
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    low, high = min(p.accuracy - p.deviation for p in points), max(p.accuracy + p.deviation for p in points)
    for p in points:
        colour = COLOURS[1] if p.method in BASELINES else COLOURS[0]
        axes.errorbar(p.sent, p.accuracy, yerr=p.deviation, color=colour, marker="o", markersize=6, capsize=3, lw=1.2)
    dense = next((p for p in points if p.method == "dense"), None)
    if dense is not None:
        axes.axhspan(
            dense.accuracy - dense.deviation, dense.accuracy + dense.deviation, color=COLOURS[1], alpha=0.12, lw=0
        )
    # Names stand in a row above, evenly spread, each with a line to its marker: the markers themselves are too close.
    ends = np.log10([points[0].sent, points[-1].sent])
    places = 10 ** np.linspace(ends[0], ends[1], len(points))
    top = high + 0.12 * (high - low)
    for p, x in zip(points, places, strict=True):
        axes.plot([p.sent, x], [p.accuracy + p.deviation, top], color="0.75", lw=0.6, zorder=0)
        axes.text(x, top, f" {p.method}", rotation=60, ha="left", va="bottom", rotation_mode="anchor", fontsize=9)
    axes.set(xscale="log", xlabel="bytes that one device sends in a step", ylabel="test accuracy (%)")
    axes.set_ylim(low - 0.05 * (high - low), top)
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=9, pad=88)
    return figure


def main() -> None:
    """Reads the page and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="a page with a table of gradcomp compare")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    options = parser.parse_args()
    draw(*read(options.page.read_text(encoding="utf-8"))).savefig(options.picture, dpi=110)


if __name__ == "__main__":
    main()
