"""The registry of methods, and the table of their costs, as their exchanges describe them."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _arguments, _checks, _markdown, memory, per_device
from gradcomp_jax._typing import PyTree
from gradcomp_jax.collectives import AllGather, AllReduce, Collective, RecursiveDoubling, as_collective
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.compressors.low_rank import LowRank
from gradcomp_jax.core import ExchangeState, Policy, changed, exchange
from gradcomp_jax.core.made_by import MadeBy, made_by
from gradcomp_jax.methods.traffic import traffic_of

Kept = Literal["nothing", "residual", "momentum", "estimate"]
Make = TypeVar("Make", bound=Callable[..., optax.GradientTransformationExtraArgs])
Update = Literal["mean", "sign", "direction"]
Momentum = Literal["after", "inside"]


@dataclasses.dataclass(frozen=True)
class Method:
    """Describes a method as users call it, and what must hold for it.

    Attributes:
        make: ``make(axis_name=..., **options)``.
        kept: what stays behind on a worker. ``nothing``: the code is unbiased, or sends the gradient unchanged.
            ``residual``: what was not sent, added to the next gradient. ``momentum``: the same for a velocity.
            ``estimate``: an estimate of the worker's gradient.
        momentum: whether momentum goes ``after`` the method or is ``inside``.
        collectives: the collectives that its ``collective`` argument takes, the default first; a method without that argument
            has one.
        paper: number of the paper on arXiv, or another reference.
        update: ``mean``: an average of gradients. ``sign``: numbers in {-1, 0, 1}. ``direction``: an optimizer's.
        biased: whether the update's expectation differs from the mean gradient, apart from clipping, saturation and the
            rounding of a cast to bfloat16.
        adam_b1: the decay of the first moment of an Adam after it; ``None`` where it is that of dense gradients.
        options: options that the method must be given, or is best shown with.
        caution: a sentence from the page of a method that does not train like SGD with the same settings; empty for the others.
            Any output that ranks methods by speed has to show it.
    """

    make: Callable[..., optax.GradientTransformationExtraArgs]
    kept: Kept
    momentum: Momentum
    collectives: tuple[str, ...]
    paper: str
    update: Update = "mean"
    biased: bool = True
    adam_b1: float | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    caution: str = ""

    @property
    def call(self) -> str:
        """Returns the call as it is written, without ``axis_name``: ``gc.dense(dtype='bfloat16')``."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"gc.{self.make.__name__}({options})"

    def build(self, *, axis_name: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
        """Returns the transformation, with :attr:`options` where no others are given."""
        return self.make(axis_name=axis_name, **{**self.options, **options})


GATHERS = ("two_phase", "all_gather")
SELECTS = (*GATHERS, "recursive_doubling")

METHODS: dict[str, Method] = {}
"""Maps names to methods, in the order of the table."""


def register(
    *,
    kept: Kept,
    momentum: Momentum,
    collectives: tuple[str, ...],
    paper: str,
    update: Update = "mean",
    biased: bool = True,
    adam_b1: float | None = None,
    name: str | None = None,
    caution: str = "",
    **options: Any,
) -> Callable[[Make], Make]:
    """Makes a decorator that registers a function as a method, under its own name or another one.

    The arguments are those of :class:`Method`; ``options`` are the defaults that the function is given. The states of its
    exchanges name the method that made them.
    """

    def registered(function: Make) -> Make:
        make = _signed(function)
        METHODS[name or make.__name__] = Method(
            make, kept, momentum, collectives, paper, update, biased, adam_b1, options, caution
        )
        return make

    return registered


def _signed(make: Make) -> Make:
    """Returns a method that puts its name and options into the states of its exchanges. Signing a method again does nothing."""
    if hasattr(make, "__wrapped__"):
        return make
    signature = inspect.signature(make)

    @functools.wraps(make)
    def signed(*args: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
        given = _arguments.bound(make, signature, args, options)
        tx = make(*given.args, **given.kwargs)
        given.apply_defaults()
        maker = made_by(make.__name__, given.arguments)

        def sign(node: Any) -> Any:
            return dataclasses.replace(node, made_by=maker) if is_exchange(node) else node

        def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
            if not changed.is_within():
                changed.refuse_other_method(state, maker)
            with changed.one_method():
                return optax.with_extra_args_support(tx).update(updates, state, params, **extra)

        return tx._replace(init=lambda params: jax.tree.map(sign, tx.init(params), is_leaf=is_exchange), update=update)

    def is_exchange(node: Any) -> bool:
        return isinstance(node, ExchangeState)

    return cast(Make, signed)


def adam_b1(state: PyTree) -> float | None:
    """Returns the decay of the first moment that an Adam after exchanges should have, ``None`` for Adam's default.

    Args:
        state: a state with exchanges, in any wrappers; the smallest decay counts.
    """
    wanted = [_adam_b1(node.made_by) for node in per_device.nodes_of(state, lambda n: isinstance(n, ExchangeState))]
    return min((b1 for b1 in wanted if b1 is not None), default=None)


def _adam_b1(maker: MadeBy) -> float | None:
    options = dict(maker.options)
    if maker.name in METHODS or options.get("memory") == "NoMemory":
        return METHODS[maker.name].adam_b1 if maker.name in METHODS else None
    coarse = {kind.__name__ for kind in _subclasses(Compressor) if kind.is_sparsifier or issubclass(kind, LowRank)}
    named = (value for option, value in maker.options if option.partition(".")[0] == "compressor")
    return 0.0 if any(value in coarse for value in named) else None


def _subclasses(kind: Any) -> Iterator[type[Compressor]]:
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)


def averaged(
    compressor: Compressor | Policy, *, collective: Collective | str, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """Returns :func:`gradcomp_jax.exchange` as methods use it: ``auto`` may choose a lossy downlink."""
    return exchange(compressor, collective=as_collective(collective, lossy_downlink=True), **options)


def feedback(error_feedback: bool, memory_dtype: Any) -> memory.Memory:
    """Returns the memory of a method that can do without one.

    Raises:
        ValueError: for a dtype that a memory cannot have, or a dtype without a memory.
    """
    kept = memory.residual(dtype=memory_dtype)
    if not error_feedback and kept.dtype != "float32":
        raise ValueError(
            f"memory_dtype={kept.dtype!r} is of what error feedback keeps, and error_feedback=False keeps nothing: leave"
            " memory_dtype out"
        )
    return kept if error_feedback else memory.none()


def refuse_without_downlink(option: str, collective: Collective) -> None:
    """Refuses an option of the downlink where nothing comes back: every worker decodes what all have sent.

    Raises:
        ValueError: naming the option and the collective.
    """
    if isinstance(collective, (AllGather, AllReduce, RecursiveDoubling)):
        raise ValueError(
            f"{option} is about what owners send, and {type(collective).__name__} has no owners: leave it out, or take"
            " collective='two_phase'"
        )


def command_name(name: str) -> str:
    """Returns a method's name as the commands print it; they accept it with ``_`` as well."""
    return name.replace("_", "-")


@dataclasses.dataclass(frozen=True)
class Row:
    """Holds the costs of a method with its defaults, on one large matrix.

    Attributes:
        name: name in :data:`METHODS`.
        uplink: bits for each entry that a worker sends to the others.
        downlink: bits for each entry that come back as the mean; 0 where payloads are gathered and nothing comes back.
        sent: bits for each entry that one worker sends in all, as :func:`gradcomp_jax.wire_bytes` counts.
        state: bytes of state for each parameter on each worker.
        narrow_state: the same with memories in int8; ``None`` where no memory can be.
        biased, momentum, collectives, paper: see :class:`Method`.
    """

    name: str
    uplink: float
    downlink: float
    sent: float
    state: float
    narrow_state: float | None
    biased: bool
    momentum: Momentum
    collectives: tuple[str, ...]
    paper: str


def table(*, workers: int = 8, shape: tuple[int, int] = (4096, 1024)) -> list[Row]:
    """Returns what every method sends and keeps for one matrix, as its exchange describes it; nothing is compiled or run.

    Args:
        workers: N.
        shape: shape of the matrix.

    Raises:
        ValueError: for fewer than two workers.
    """
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
        "state / int8",
        "biased",
        "momentum",
        "collectives",
        "paper",
    )


def markdown_table(*, workers: int = 8) -> str:
    """Returns :func:`table` as Markdown, as in the README."""
    lines = _markdown.table(header(workers), map(cells, table(workers=workers)), align="lrrrl")
    return "\n".join(lines) + "\n"


def cells(row: Row) -> tuple[str, ...]:
    """Returns the cells of one row as text."""
    method, downlink = METHODS[row.name], "-" if not row.downlink else _bits(row.downlink)
    link = f"[{row.paper}](https://arxiv.org/abs/{row.paper})" if row.paper[:1].isdigit() else row.paper
    return (
        f"`{method.call}`",
        f"{_bits(row.uplink)} / {downlink}",
        _bits(row.sent),
        _bytes(row),
        "yes" if row.biased else "no",
        row.momentum,
        ", ".join(row.collectives),
        link,
    )


def _bytes(row: Row) -> str:
    if row.state <= 1e-3:
        # Step counters take a few bytes in all.
        return "0"
    return f"{row.state:.3g} B" if row.narrow_state is None else f"{row.state:.3g} / {row.narrow_state:.2g} B"


def _bits(bits: float) -> str:
    return f"{bits:.2g}" if bits < 10 else f"{bits:.0f}"
