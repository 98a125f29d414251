"""Draws accuracy against bytes from a table that ``gradcomp compare --markdown`` has written.

    python benchmarks/accuracy_plot.py docs/results/digits-all.md docs/results/digits-all.png

No training: the figures are those of the table. Every method of the table is in the picture, those that lose too; names have
those that no other beats in both bytes and accuracy.
"""

import argparse
import re
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import pareto
from benchmarks.pareto import Point
from benchmarks.tasks.tasks import TASKS
from gradcomp_jax.cli.colours import COLOURS

ROW = re.compile(r"^\| ([\w-]+) \| ([\d.]+) ± ([\d.]+) \| ([\d,]+) \|", re.MULTILINE)
BASELINES = ("dense", "dense-bf16")


def read(page: str) -> tuple[str, list[Point]]:
    """Returns what was trained and how, and the methods, the fewest bytes first.

    Raises:
        ValueError: for a page without such a table.
    """
    points = [
        Point(
            name,
            float(sent.replace(",", "")),
            float(mean) - float(deviation),
            float(mean),
            float(mean) + float(deviation),
        )
        for name, mean, deviation, sent in ROW.findall(page)
    ]
    if not points:
        raise ValueError(
            "no row reads like '| dgc | 97.94 ± 0.58 | 3,969 |': give a page that gradcomp compare has written"
        )
    task, _, settings = page.partition("\n")[0].removeprefix("# ").partition(": ")
    return f"{TASKS[task].summary}\n{settings}", sorted(points, key=lambda point: point.sent)


def draw(title: str, points: list[Point]) -> Figure:
    """Draws one marker a method; a band is one standard deviation of dense float32."""
    figure = Figure(figsize=(8.4, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    pareto.draw(axes, [points], more_is_better=True, baselines=BASELINES)
    dense = next((p for p in points if p.name == "dense"), None)
    if dense is not None:
        axes.axhspan(dense.low, dense.high, color=COLOURS[1], alpha=0.12, lw=0)
    axes.set_ylabel("test accuracy (%)")
    axes.set_title(title, fontsize=9)
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
