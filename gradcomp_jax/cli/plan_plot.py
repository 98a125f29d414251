"""A plan as a picture: speed-up against workers and against bandwidth."""

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from gradcomp_jax.cli import units
from gradcomp_jax.cli.colours import COLOURS
from gradcomp_jax.cli.plan_report import link
from gradcomp_jax.methods.registry import command_name
from gradcomp_jax.planning.outlook import Outlook


def picture_of(found: Outlook, what: str) -> bytes:
    """Returns the picture as a PNG file."""
    file = io.BytesIO()
    draw(found, what).savefig(file, dpi=140)
    return file.getvalue()


def draw(found: Outlook, what: str) -> Figure:
    """Draws both panels of the picture."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    cluster = found.cluster
    workers, lines = found.by_workers
    left.plot(workers, workers, color="#BBBBBB", linestyle=":", label="ideal")
    for number, (name, values) in enumerate(lines.items()):
        left.plot(
            workers, values, _dashes(number), marker="o", markersize=4, color=COLOURS[number], label=command_name(name)
        )
    left.set_xscale("log", base=2)
    left.set_yscale("log", base=2)
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_formatter(ScalarFormatter())
    left.axvline(cluster.workers, color="#DDDDDD", zorder=0)
    left.set(xlabel="workers", ylabel="speed-up over one worker", title=f"By workers, at {link(found)}")
    rates, lines = found.by_rate
    for number, values in enumerate(lines.values()):
        right.plot([8 * r / 1e9 for r in rates], values, _dashes(number), color=COLOURS[number])
    right.set_xscale("log")
    right.axvline(8 * cluster.outer.rate / 1e9, color="#DDDDDD", zorder=0)
    right.axhline(cluster.workers, color="#BBBBBB", linestyle=":")
    right.set(
        xlabel="rate of a node's link (Gbit/s)",
        ylabel="speed-up over one worker",
        title=f"By bandwidth, {cluster.workers} workers",
        ylim=(0, None),
    )
    for axes in (left, right):
        axes.grid(alpha=0.25)
    left.legend(fontsize=9)
    figure.suptitle(
        f"{what}, {units.show_seconds(found.workload.compute)} a step: modelled, weak scaling; prices in steps not counted"
    )
    return figure


def _dashes(number: int) -> str:
    """Lets a line be seen below one that goes over it."""
    return "--" if number > 2 else "-"
