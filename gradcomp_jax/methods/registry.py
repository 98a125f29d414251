"""What is known of every method, and the table of what they cost, as their exchanges describe it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _checks, _markdown
from gradcomp_jax.collectives import Collective, as_collective
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.methods.traffic import traffic_of
from gradcomp_jax.transforms import Policy, exchange

Kept = Literal["nothing", "residual", "momentum", "estimate"]
Make = TypeVar("Make", bound=Callable[..., optax.GradientTransformationExtraArgs])
Update = Literal["mean", "sign", "direction"]
Momentum = Literal["after", "inside"]


@dataclasses.dataclass(frozen=True)
class Method:
    """A method as users call it, and what must hold of it.

    Attributes:
        make: ``make(axis_name=..., **options)``.
        kept: what stays behind on a worker. ``nothing``: the code is unbiased, or sends the gradient as it is.
            ``residual``: what was not sent, added to the next gradient. ``momentum``: the same of a velocity.
            ``estimate``: an estimate of the worker's gradient.
        momentum: whether momentum goes ``after`` it or lives ``inside``.
        collectives: the collectives that its ``collective`` argument takes, the default first; one that takes none has one.
        paper: number of the paper on arXiv, or another reference.
        update: ``mean``: an average of gradients. ``sign``: numbers in {-1, 0, 1}. ``direction``: an optimizer's.
        biased: whether the update's expectation is not the mean gradient, clipping, saturation and the rounding of a cast to
            bfloat16 aside.
        options: what it must be given, or is best seen with.
    """

    make: Callable[..., optax.GradientTransformationExtraArgs]
    kept: Kept
    momentum: Momentum
    collectives: tuple[str, ...]
    paper: str
    update: Update = "mean"
    biased: bool = True
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def build(self, *, axis_name: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
        """Returns the transformation, with :attr:`options` unless others are given."""
        return self.make(axis_name=axis_name, **{**self.options, **options})


GATHERS = ("two_phase", "all_gather")
SELECTS = (*GATHERS, "recursive_doubling")

METHODS: dict[str, Method] = {}
"""Names to methods, in the order of the table."""


def register(
    *,
    kept: Kept,
    momentum: Momentum,
    collectives: tuple[str, ...],
    paper: str,
    update: Update = "mean",
    biased: bool = True,
    name: str | None = None,
    **options: Any,
) -> Callable[[Make], Make]:
    """Makes a decorator that registers a function as a method, under its own name or another one.

    The arguments are those of :class:`Method`; ``options`` are what the function is given by default.
    """

    def registered(make: Make) -> Make:
        METHODS[name or make.__name__] = Method(make, kept, momentum, collectives, paper, update, biased, options)
        return make

    return registered


def averaged(
    compressor: Compressor | Policy, *, collective: Collective | str, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """Returns :func:`gradcomp_jax.exchange` as methods have it: what ``auto`` chooses may lose something on the downlink."""
    return exchange(compressor, collective=as_collective(collective, lossy_downlink=True), **options)


def command_name(name: str) -> str:
    """Returns a method's name as the commands print it; they take it with ``_`` as well."""
    return name.replace("_", "-")


@dataclasses.dataclass(frozen=True)
class Row:
    """What a method costs with its defaults, on one large matrix.

    Attributes:
        name: in :data:`METHODS`.
        uplink: bits for each entry that a worker sends to the others.
        downlink: bits for each entry that come back as the mean; 0 where payloads are gathered and nothing comes back.
        sent: bits for each entry that one worker sends in all, as :func:`gradcomp_jax.wire_bytes` counts.
        state: bytes of state for each parameter on each worker.
        biased, momentum, collectives, paper: see :class:`Method`.
    """

    name: str
    uplink: float
    downlink: float
    sent: float
    state: float
    biased: bool
    momentum: Momentum
    collectives: tuple[str, ...]
    paper: str


def table(*, workers: int = 8, shape: tuple[int, int] = (4096, 1024)) -> list[Row]:
    """Returns what every method sends and keeps of one matrix, as its exchange describes it; nothing is compiled or run.

    Args:
        workers: N.
        shape: of the matrix.

    Raises:
        ValueError: for fewer than two workers.
    """
    if _checks.positive_int("workers", workers) < 2:
        raise ValueError(f"workers must be at least 2, got {workers}: one worker sends nothing")
    return [_row(name, workers, tuple(shape)) for name in METHODS]


@functools.cache
def _row(name: str, workers: int, shape: tuple[int, int]) -> Row:
    method, size, axis = METHODS[name], shape[0] * shape[1], "workers"
    traffic = traffic_of(method.build(axis_name=axis), jax.ShapeDtypeStruct(shape, jnp.float32), {axis: workers})
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
        biased=method.biased,
        momentum=method.momentum,
        collectives=method.collectives,
        paper=method.paper,
    )


def header(workers: int) -> tuple[str, ...]:
    """Returns the names of the columns of :func:`cells`."""
    return (
        "method",
        "bits uplink / downlink",
        f"sent, N = {workers}",
        "state",
        "biased",
        "momentum",
        "collectives",
        "paper",
    )


def markdown_table(*, workers: int = 8) -> str:
    """Returns :func:`table` as Markdown, as it stands in the README."""
    lines = _markdown.table(header(workers), map(cells, table(workers=workers)), align="lrrrl")
    return "\n".join(lines) + "\n"


def cells(row: Row) -> tuple[str, ...]:
    """Returns the cells of one row as text."""
    method, downlink = METHODS[row.name], "-" if not row.downlink else _bits(row.downlink)
    options = ", ".join(f"{k}={v!r}" for k, v in method.options.items())
    link = f"[{row.paper}](https://arxiv.org/abs/{row.paper})" if row.paper[:1].isdigit() else row.paper
    return (
        f"`gc.{method.make.__name__}({options})`",
        f"{_bits(row.uplink)} / {downlink}",
        _bits(row.sent),
        # Counters of steps are a few bytes in all.
        f"{row.state:.3g} B" if row.state > 1e-3 else "0",
        "yes" if row.biased else "no",
        row.momentum,
        ", ".join(row.collectives),
        link,
    )


def _bits(bits: float) -> str:
    return f"{bits:.2g}" if bits < 10 else f"{bits:.0f}"
