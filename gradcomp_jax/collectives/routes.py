"""How payloads cross an axis: which ways there are, and which one ``auto`` takes."""

import dataclasses
from typing import Literal, get_args

from gradcomp_jax import _checks
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.compressors.dense import Dense
from gradcomp_jax.memory import Memory
from gradcomp_jax.memory.momentum import MomentumCorrection

Kind = Literal["auto", "gather", "two_phase", "sum"]
Remainder = Literal["put_back", "server", "drop"]
INT8_WORKERS = 127


@dataclasses.dataclass(frozen=True)
class Route:
    """A way across an axis of N workers. Build one with :func:`gather`, :func:`two_phase`, :func:`add` or :func:`auto`.

    Attributes:
        kind: ``gather``: everybody gets every payload; (N-1) payloads are sent. ``two_phase``: payload rows go to
            their owners, who reduce them, encode the mean and give it to everybody; 2(N-1)/N payloads whatever N
            is. ``sum``: an all-reduce of payloads that add up. ``auto``: decided by bytes once N is known.
        remainder: what becomes of what a two-phase exchange's second encoding loses. ``put_back``: workers take
            their own entries that the owner did not keep as not sent, and the owner keeps the rounding. ``server``:
            the owner adds it to its next mean. ``drop``: nothing; for codes without a memory.
        second_encoding: whether ``auto`` may choose a two-phase exchange whose second encoding loses something.
    """

    kind: Kind
    remainder: Remainder | None = None
    second_encoding: bool = False


def gather() -> Route:
    """Everybody gets every payload: nothing is encoded twice, and (N-1) payloads are sent. For few workers."""
    return Route("gather")


def two_phase(remainder: Remainder | None = None) -> Route:
    """Reduce-scatter and all-gather of payloads, the sharded parameter server.

    Args:
        remainder: see :class:`Route`; by default ``put_back`` where there is a memory, else ``drop``.
    """
    if remainder is not None:
        _checks.one_of("remainder", remainder, get_args(Remainder))
    return Route("two_phase", remainder)


def add() -> Route:
    """An all-reduce of the payloads themselves, for codes whose payloads add up."""
    return Route("sum")


def auto(*, second_encoding: bool = False) -> Route:
    """The cheapest route by bytes; ``second_encoding`` admits one that encodes the mean once more with a loss."""
    return Route("auto", None, second_encoding)


def as_route(route: Route | str, *, second_encoding: bool = False) -> Route:
    """A route from its name, or as it is."""
    if isinstance(route, Route):
        return route
    _checks.one_of("route", route, get_args(Kind))
    return Route(route, None, second_encoding)  # type: ignore[arg-type]


def check(route: Route, compressor: Compressor, memory: Memory) -> None:
    """Refuses combinations that cannot keep the laws, naming the remedy.

    Raises:
        ValueError: at construction, before anything is traced.
    """
    name = type(compressor).__name__
    if route.kind == "sum" and not compressor.summable:
        raise ValueError(
            f"route='sum' needs payloads that add up, and those of {name} do not; use route='two_phase' or 'gather'"
            " (ternary adds up with share_scale=True, packing='int8')"
        )
    if route.remainder == "put_back" and not memory.keeps:
        raise ValueError(
            "remainder='put_back' needs a memory to put it into; use memory=residual() or remainder='drop'"
        )
    if route.remainder == "drop" and memory.keeps:
        raise ValueError("remainder='drop' would lose what the memory exists to keep; use 'put_back' or 'server'")
    if route.remainder == "server" and compressor.selects and isinstance(memory, MomentumCorrection):
        raise ValueError(
            "remainder='server' delays a momentum-corrected selection, which makes training diverge; use 'put_back'"
        )


def remainder_of(route: Route, compressor: Compressor, memory: Memory, workers: int) -> Remainder | None:
    """What happens to the loss of the second encoding; ``None`` where there is no loss."""
    if route.kind != "two_phase" or compressor.exact_back(workers):
        return None
    return route.remainder or ("put_back" if memory.keeps else "drop")


def keeps_server_residual(route: Route, compressor: Compressor, memory: Memory) -> bool:
    """Whether a two-phase exchange on this route has state at the owners."""
    return remainder_of(route, compressor, memory, 2) == "server"


def sent_bytes(kind: Kind, compressor: Compressor, rows: int, workers: int) -> int:
    """Bytes that one of ``workers`` sends for ``rows`` rows, padding to the number of workers left out."""
    up = compressor.payload_bytes(1) * rows
    if kind == "gather":
        return (workers - 1) * up
    back = up if kind == "sum" else compressor.back(workers).payload_bytes(1) * rows
    return (workers - 1) * (up + back) // workers


def resolve(route: Route, compressor: Compressor, rows: int, workers: int) -> Route:
    """The route that ``auto`` stands for, and a check of the integer headroom of ``sum``.

    Raises:
        ValueError: if int8 sums of this many workers could wrap.
    """
    int8_sum = compressor.summable and not isinstance(compressor, Dense)
    if route.kind != "auto":
        if route.kind == "sum" and int8_sum and workers > INT8_WORKERS:
            raise ValueError(
                f"an int8 sum of {workers} ternaries can wrap (at most {INT8_WORKERS} workers); use route='two_phase'"
            )
        return route
    # On equal bytes the earlier one wins: one collective is better than two, and a bfloat16 all-reduce is widened
    # to float32 by some backends, where a two-phase exchange of 16-bit words is not.
    kinds: list[Kind] = ["sum"] if compressor.summable and compressor.lossless else []
    kinds.append("gather")
    if compressor.exact_back(workers) or route.second_encoding or isinstance(compressor, Dense):
        kinds.append("two_phase")
    if int8_sum and workers <= INT8_WORKERS:
        kinds.append("sum")
    best = min(kinds, key=lambda kind: sent_bytes(kind, compressor, rows, workers))
    return dataclasses.replace(route, kind=best)
