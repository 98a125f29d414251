"""A plan as a table and a sentence."""

import math

from rich import box
from rich.table import Table

from gradcomp_jax.cli import units
from gradcomp_jax.methods.registry import command_name
from gradcomp_jax.planning import Calibration, speed_up
from gradcomp_jax.planning.outlook import Outlook
from gradcomp_jax.planning.predict import CLEAR

_TIMES = ("step", "compute", "compress", "inner", "outer", "exposed")
_ALL = ("method", *_TIMES, "x dense", "efficiency", "sent", "state", "loses above")
# What 80 characters hold; the JSON has everything.
_SOME = ("method", "step", "compress", "inner", "outer", "x dense", "loses above")
_WIDE = 120


def title(found: Outlook, what: str) -> str:
    """One line that says what was asked."""
    cluster, workload = found.cluster, found.workload
    nodes = f", {cluster.per_node} to a node" if cluster.per_node > 1 else ""
    return (
        f"{what}: {workload.values:,} values, {units.show_seconds(workload.compute)} a step;"
        f" {cluster.workers} workers{nodes}, {units.show_rate(cluster.outer.rate)},"
        f" {units.show_seconds(cluster.outer.latency)}"
    )


def rows(found: Outlook) -> list[dict[str, str]]:
    """Cells by column, the fastest method first."""
    dense = found.dense.step
    return [
        {
            "method": command_name(p.method) + (" *" if p.layout == "hierarchical" else ""),
            **{part: units.show_seconds(getattr(p, part)) for part in _TIMES},
            "x dense": f"{dense / p.step:.2f}x",
            "efficiency": f"{100 * speed_up(p, found.cluster.workers) / found.cluster.workers:.0f}%",
            "sent": units.show_bytes(p.sent),
            # Counters are a few bytes in all.
            "state": units.show_bytes(p.state) if p.state > 1024 else "0",
            "loses above": _even(found.break_even.get(p.method)),
        }
        for p in found.verdict.ranking
    ]


def table(found: Outlook, width: int) -> Table:
    """Returns the table for a terminal that is ``width`` characters wide."""
    columns = _ALL if width >= _WIDE else _SOME
    result = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        result.add_column(column, justify="right" if column != "method" else "left", no_wrap=True)
    for row in rows(found):
        result.add_row(*(row[column] for column in columns))
    return result


def sentence(found: Outlook) -> str:
    """Returns the verdict as one sentence."""
    verdict, fastest, dense = found.verdict, found.best, found.dense
    best, plain = command_name(fastest.method), command_name(dense.method)
    if verdict.compress:
        own = f"{best} takes {units.show_seconds(fastest.step)} a step, {verdict.gain:.2f}x as fast as {plain}"
        return f"Compress: {own}, which wins {_above(found.break_even[fastest.method])}."
    gain = dense.step / fastest.step
    there = f"{plain} takes {units.show_seconds(dense.step)} a step"
    closest, rate = max(found.break_even.items(), key=lambda item: item[1])
    faster = f"below {units.show_rate(rate)} {command_name(closest)} is faster"
    below = faster if rate else "and no method is faster at any rate"
    if gain > 1:
        return f"Do not compress: {there}, and {best} is only {gain:.2f}x as fast (worth it from {CLEAR:g}x)."
    return f"Do not compress: {there}, the fastest method {units.show_seconds(fastest.step)} ({best}); {below}."


def notes(found: Outlook, calibration: Calibration | None, *, matrices: bool) -> list[str]:
    """What a reader has to know of the figures."""
    lines = [
        "modelled: collectives by latency and bandwidth, bytes as the methods' exchanges send them, defaults throughout."
    ]
    if calibration is None:
        lines.append(
            "compress: copies of the gradient, as measured on a CPU, at --memory-rate; calibrate for your device."
        )
    else:
        worst = max(fit.errors[1] for fit in calibration.fits.values())
        lines.append(f"outer: measured collectives; the lines through them are off by {100 * worst:.0f}% at most.")
    if found.cluster.per_node > 1:
        lines.append("*: dense within a node, the method between nodes (gc.hierarchical); the others in one exchange.")
    if matrices:
        lines.append("parameters taken as matrices of 1024 x 1024: PowerSGD's bytes depend on it (--model, --from).")
    lines.append(
        "sent: bytes that leave a node in a step. loses above: the rate from which the better dense one is faster."
    )
    return lines


def _even(rate: float | None) -> str:
    if rate is None:
        return ""
    if rate == 0:
        return "always"
    return "never" if math.isinf(rate) else units.show_rate(rate)


def _above(rate: float) -> str:
    return "at no rate" if math.isinf(rate) else f"above {units.show_rate(rate)}"
