"""The registry of methods, and what they have in common."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar, cast

import jax
import optax

from gradcomp_jax import _arguments, memory, per_device
from gradcomp_jax._typing import PyTree
from gradcomp_jax.collectives import AllGather, AllReduce, Collective, RecursiveDoubling, as_collective
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.compressors.low_rank import LowRank
from gradcomp_jax.core import ExchangeState, Policy, changed, exchange
from gradcomp_jax.core.made_by import MadeBy, made_by

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
        may_change: its options with which the stored state means the same whatever their values: how much is sent, how fast it
            learns, and random numbers. A checkpoint is restored with others of these, and with a warning.
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
    may_change: frozenset[str] = frozenset()
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

SENT = ("density", "downlink_density", "bits", "dtype", "pack_positions", "collective", "remainder")
DRAWN = ("key", "seed", "generator")
"""Options of how much is sent, and of random numbers, which may change in every method."""

METHODS: dict[str, Method] = {}
"""Maps names to methods, in the order of their table."""


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
    may_change: tuple[str, ...] = (),
    caution: str = "",
    **options: Any,
) -> Callable[[Make], Make]:
    """Makes a decorator that registers a function as a method, under its own name or another one.

    The arguments are those of :class:`Method`, ``may_change`` beside :data:`SENT` and :data:`DRAWN`; ``options`` are the
    defaults that the function is given. The states of its
    exchanges name the method that made them.
    """

    def registered(function: Make) -> Make:
        make, known = _signed(function), frozenset((*SENT, *DRAWN, *may_change))
        METHODS[name or make.__name__] = Method(
            make, kept, momentum, collectives, paper, update, biased, adam_b1, options, known, caution
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

        def init(params: Any) -> Any:
            return jax.tree.map(sign, tx.init(params), is_leaf=is_exchange)

        return tx._replace(init=init, update=changed.of_method(tx, maker))

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
