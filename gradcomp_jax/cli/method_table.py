"""The table of all methods and their costs, as their exchanges describe them, for a terminal and as Markdown."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp

from gradcomp_jax import _checks, _markdown
from gradcomp_jax.cli.tables import Columns
from gradcomp_jax.methods.registry import METHODS, command_name
from gradcomp_jax.methods.traffic import traffic_of

NOTE = (
    "bits: for each value of a 4096 x 1024 matrix, to the owners and back, and what one worker sends in all. state: bytes for"
    " each parameter, and with memory_dtype='int8'. momentum: where it goes, after the method or inside. The first collective"
    " is the default. Papers by number are on arxiv.org."
)
"""Below the table."""


def columns(workers: int) -> Columns:
    """Returns :func:`table` for a terminal: bits for each value, bytes of state for each parameter."""
    names = [name.replace(" / ", "\n/ ") for name in header(workers)]
    lines = [
        dict(zip(names, (command_name(row.name), *cells(row)[1:-1], METHODS[row.name].paper), strict=True))
        for row in table(workers=workers)
    ]
    return Columns(
        lines,
        dropped_first=("paper", "collectives", "momentum", "biased"),
        left=("biased", "momentum", "collectives", "paper"),
    )


@dataclasses.dataclass(frozen=True)
class Row:
    """Holds the costs of a method with its defaults, on one large matrix.

    Attributes:
        name: name in :data:`gradcomp_jax.methods.METHODS`.
        uplink: bits for each entry that a worker sends to the others.
        downlink: bits for each entry that come back as the mean; 0 where payloads are gathered and nothing comes back.
        sent: bits for each entry that one worker sends in all, as :func:`gradcomp_jax.wire_bytes` counts.
        state: bytes of state for each parameter on each worker.
        narrow_state: the same with memories in int8; ``None`` where no memory can be.
    """

    name: str
    uplink: float
    downlink: float
    sent: float
    state: float
    narrow_state: float | None


def table(*, workers: int = 8, shape: tuple[int, int] = (4096, 1024)) -> list[Row]:
    """Returns what every method sends and keeps for one matrix, as its exchange describes it; nothing is compiled or run."""
    if _checks.positive_int("workers", workers) < 2:
        raise ValueError(f"workers must be at least 2, got {workers}: one worker sends nothing")
    return [_row(name, workers, tuple(shape)) for name in METHODS]


@functools.cache
def _row(name: str, workers: int, shape: tuple[int, int]) -> Row:
    method, size, axis = METHODS[name], shape[0] * shape[1], "workers"
    params, along = jax.ShapeDtypeStruct(shape, jnp.float32), {axis: workers}
    traffic = traffic_of(method.build(axis_name=axis), params, along)
    narrow = None
    if method.kept in ("residual", "momentum") and "memory_dtype" in inspect.signature(method.make).parameters:
        narrow = traffic_of(method.build(axis_name=axis, memory_dtype="int8"), params, along).state / size
    put_in = {collective.kind: collective.operand for collective in traffic.collectives}
    summed, gathered = put_in.get("all-reduce", 0), put_in.get("all-gather", 0)
    uplink = put_in.get("all-to-all", 0) + put_in.get("collective-permute", 0)
    downlink = gathered * workers if uplink else 0
    uplink = uplink or gathered
    return Row(
        name,
        uplink=8 * (uplink + summed) / size,
        downlink=8 * (downlink + summed) / size,
        sent=8 * traffic.sent / size,
        state=traffic.state / size,
        narrow_state=narrow,
    )


def header(workers: int) -> tuple[str, ...]:
    """Returns the names of the columns of :func:`cells`."""
    return (
        "method",
        "bits uplink / downlink",
        f"sent, N = {workers}",
        "state / int8",
        "biased",
        "momentum",
        "collectives",
        "paper",
    )


def markdown_table(*, workers: int = 8) -> str:
    """Returns :func:`table` as Markdown, as docs/methods/index.md has it."""
    lines = _markdown.table(header(workers), map(cells, table(workers=workers)), align="lrrrl")
    return "\n".join(lines) + "\n"


def cells(row: Row) -> tuple[str, ...]:
    """Returns the cells of one row as text."""
    method, downlink = METHODS[row.name], "-" if not row.downlink else _bits(row.downlink)
    link = f"[{method.paper}](https://arxiv.org/abs/{method.paper})" if method.paper[:1].isdigit() else method.paper
    return (
        f"`{method.call}`",
        f"{_bits(row.uplink)} / {downlink}",
        _bits(row.sent),
        _bytes(row),
        "yes" if method.biased else "no",
        method.momentum,
        ", ".join(method.collectives),
        link,
    )


def _bytes(row: Row) -> str:
    if row.state <= 1e-3:
        # Step counters take a few bytes in all.
        return "0"
    return f"{row.state:.3g} B" if row.narrow_state is None else f"{row.state:.3g} / {row.narrow_state:.2g} B"


def _bits(bits: float) -> str:
    return f"{bits:.2g}" if bits < 10 else f"{bits:.0f}"
