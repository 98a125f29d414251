"""How payloads cross an axis: which ways there are, and which one ``auto`` takes."""

import dataclasses
from typing import Any, Literal, get_args

from gradcomp_jax import _checks
from gradcomp_jax._typing import PyTree
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.compressors.dense import Dense
from gradcomp_jax.memory import Memory
from gradcomp_jax.memory.momentum import MomentumCorrection

# Entries up to which what goes dense joins a payload on its way: beyond, the copies cost more than a collective's latency.
MOST_RIDING = 2**18

# Workers up to which a gather of selections is as few bytes as two phases, in one message in the place of two, and exact.
MOST_GATHERED = 2

Kind = Literal["auto", "gather", "two_phase", "sum", "doubling", "reduce_scatter"]
Remainder = Literal["settle", "put_back", "server", "drop"]


@dataclasses.dataclass(frozen=True)
class Route:
    """A way across an axis of N workers.

    Build one with :func:`gather`, :func:`two_phase`, :func:`add`, :func:`doubling`, :func:`reduce_scatter` or :func:`auto`.

    Attributes:
        kind: ``gather``: everybody gets every payload; (N-1) payloads are sent. ``two_phase``: payload rows go to
            their owners, who reduce them, encode the mean and give it to everybody; 2(N-1)/N payloads whatever N
            is. ``sum``: an all-reduce of payloads that add up. ``doubling``: recursive doubling, payloads until the dense
            sum is smaller. ``reduce_scatter``: the first of two phases, each worker keeps the mean of what it owns.
            ``auto``: decided once N is known: by bytes, the fewer messages on equal ones; a selection whose mean may be
            selected once more goes in two phases from three workers on.
        remainder: what becomes of what a two-phase exchange's second encoding loses. ``server``: the owner adds it to its
            next mean. ``settle``, for selections, whose losses are whole entries: each worker takes back of an entry that
            the owner did not keep at most the smallest magnitude that it did keep in the row, and the owner adds the rest
            to its next mean. ``put_back``: the owner's own memory takes what rounding lost, and the workers take back,
            whole, what a selection did not keep; where their gradients cancel, that is for ever. ``drop``: nothing; for
            codes without a memory.
        second_encoding: whether ``auto`` may choose a two-phase exchange whose second encoding loses something.
        param_specs: of ``reduce_scatter``: where the parameters lie.
    """

    kind: Kind
    remainder: Remainder | None = None
    second_encoding: bool = False
    param_specs: Any = dataclasses.field(default=None, hash=False)


def gather() -> Route:
    """Everybody gets every payload: nothing is encoded twice, and (N-1) payloads are sent. For few workers."""
    return Route("gather")


def two_phase(remainder: Remainder | None = None) -> Route:
    """Reduce-scatter and all-gather of payloads, the sharded parameter server.

    Args:
        remainder: see :class:`Route`; by default ``server`` for selections with a memory, ``settle`` for those with
            momentum in it, ``put_back`` for other codes with one, else ``drop``.
    """
    if remainder is not None:
        _checks.one_of("remainder", remainder, get_args(Remainder))
    return Route("two_phase", remainder)


def add() -> Route:
    """An all-reduce of the payloads themselves, for codes whose payloads add up."""
    return Route("sum")


def doubling() -> Route:
    """Recursive doubling: in log2(N) rounds, each pair of workers exchanges all that either has.

    What a worker has doubles in every round; once the dense sum of it is fewer bytes than the payloads, that crosses
    instead. Few messages, for a short latency-bound exchange; N must be a power of two. Renggli et al., 2019, SparCML,
    https://arxiv.org/abs/1802.08021, section 5.3.
    """
    return Route("doubling")


def reduce_scatter(param_specs: PyTree) -> Route:
    """Each worker gets the mean of its own shard of every sharded parameter, and of no other: for FSDP and ZeRO.

    Payloads go to their owners and no mean goes back: (N-1)/N payloads are sent, and nothing is encoded twice. A tensor
    whose spec lays a dimension along the axis of the workers is cut along it, whole gradients in, shards of the update
    out; memories are of whole gradients, because each worker has one. Tensors that no spec divides take ``auto``.

    Args:
        param_specs: the parameters' ``jax.sharding.PartitionSpec``, a tree or a prefix of it.

    References:
        Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054, section 5.2 (ZeRO stage 2: partitioned gradients).
    """
    return Route("reduce_scatter", param_specs=param_specs)


def auto(*, second_encoding: bool = False) -> Route:
    """The cheapest route by bytes; ``second_encoding`` admits one that encodes the mean once more with a loss.

    Selections with ``second_encoding`` take a gather for two workers and two phases for more, however many: memory and bytes
    then do not grow with N.
    """
    return Route("auto", None, second_encoding)


def as_route(route: Route | str, *, second_encoding: bool = False) -> Route:
    """A route from its name, or as it is."""
    if isinstance(route, Route):
        return route
    _checks.one_of("route", route, [kind for kind in get_args(Kind) if kind != "reduce_scatter"])
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
    if route.kind == "doubling" and not compressor.selects:
        raise ValueError(f"route='doubling' is for selections, and {name} is none; use route='two_phase' or 'gather'")
    if compressor.agrees == "mean" and route.kind not in ("auto", "sum"):
        raise ValueError(
            f"the payloads of {name} must be added, route={route.kind!r} does not; use route='auto' or 'sum'"
        )
    if route.remainder in ("settle", "put_back") and not memory.keeps:
        raise ValueError(
            f"remainder={route.remainder!r} needs a memory to put it into; use memory=residual() or remainder='drop'"
        )
    if route.remainder == "settle" and not compressor.back(2).drops:
        raise ValueError(
            f"remainder='settle' is for a downlink that leaves entries out, and that of {name} does not; use 'put_back'"
        )
    if route.remainder == "drop" and memory.keeps:
        raise ValueError("remainder='drop' would lose what the memory exists to keep; leave it out, or use 'server'")
    if route.remainder == "server" and compressor.selects and isinstance(memory, MomentumCorrection):
        raise ValueError(
            "remainder='server' delays a momentum-corrected selection, which makes training diverge; use 'settle'"
        )


def remainder_of(route: Route, compressor: Compressor, memory: Memory, workers: int) -> Remainder | None:
    """What happens to the loss of the second encoding; ``None`` where there is no loss."""
    if route.kind != "two_phase" or compressor.exact_back(workers):
        return None
    if route.remainder is not None:
        return route.remainder
    if not memory.keeps:
        return "drop"
    if not compressor.back(workers).drops:
        return "put_back"
    return "settle" if isinstance(memory, MomentumCorrection) else "server"


def owners_from(route: Route, compressor: Compressor, memory: Memory) -> int | None:
    """The number of workers from which on owners have a residual; ``None`` if they never have one."""
    many = MOST_GATHERED + 1
    if route.kind not in ("auto", "two_phase"):
        return None
    if remainder_of(resolve(route, compressor, 1, many), compressor, memory, many) not in ("settle", "server"):
        return None
    return 1 if route.kind == "two_phase" else many


def sent_bytes(kind: Kind, compressor: Compressor, rows: int, workers: int) -> int:
    """Bytes that one of ``workers`` sends for ``rows`` rows, padding to the number of workers left out."""
    up = compressor.payload_bytes(1) * rows
    if kind == "reduce_scatter":
        return (workers - 1) * up // workers
    if kind == "gather":
        return (workers - 1) * up
    if kind == "doubling":
        dense = rows * compressor.block * 4
        return sum(dense if dense_is_less(compressor, have) else have * up for have in rounds(workers))
    back = up if kind == "sum" else compressor.back(workers).payload_bytes(1) * rows
    return (workers - 1) * (up + back) // workers


def dense_is_less(compressor: Compressor, payloads: int) -> bool:
    """Whether a row's float32 sum is no more bytes than so many workers' payloads of it."""
    return payloads * compressor.payload_bytes(1) >= compressor.block * 4


def rounds(workers: int) -> list[int]:
    """How many workers' payloads each has before each round of recursive doubling: 1, 2, 4, ..., N / 2."""
    return [1 << r for r in range(workers.bit_length() - 1)]


def resolve(route: Route, compressor: Compressor, rows: int, workers: int) -> Route:
    """The route that ``auto`` stands for, and a check of what depends on the number of workers.

    Raises:
        ValueError: if integer sums of this many workers could wrap, or recursive doubling does not come out even.
    """
    fits = compressor.most_workers is None or workers <= compressor.most_workers
    if route.kind == "sum" and not fits:
        raise ValueError(
            f"an int8 sum of {workers} ternaries can wrap (at most {compressor.most_workers} workers);"
            " use route='two_phase'"
        )
    if route.kind == "doubling" and workers & (workers - 1):
        raise ValueError(f"recursive doubling needs a power of two of workers, got {workers}; use route='two_phase'")
    if route.kind != "auto":
        return route
    if route.second_encoding and compressor.back(workers).drops:
        # By the number of workers alone: whether owners have a residual hangs on it, in every part and bucket alike.
        return dataclasses.replace(route, kind="gather" if workers <= MOST_GATHERED else "two_phase")
    # On equal bytes the earlier one wins: one collective is better than two. A bfloat16 all-reduce is widened to
    # float32 by some backends, where a two-phase exchange of 16-bit words is not.
    is_dense = isinstance(compressor, Dense)
    kinds: list[Kind] = ["sum"] if compressor.summable and fits and (compressor.lossless or not is_dense) else []
    if compressor.agrees != "mean":
        kinds.append("gather")
        if compressor.exact_back(workers) or route.second_encoding or is_dense:
            kinds.append("two_phase")
    best = min(kinds, key=lambda kind: sent_bytes(kind, compressor, rows, workers))
    return dataclasses.replace(route, kind=best)


def rides_along(asked: Route, route: Route, compressor: Compressor, rows: int) -> bool:
    """Whether an all-reduce that ``auto`` resolved to may be two phases instead, beside a payload that takes them.

    An all-reduce is a reduce-scatter and an all-gather: float32 numbers sent to their owners and back are as many bytes,
    and the same sums, without a collective of their own. Over a slow link that saves the latency of one.
    """
    dense = isinstance(compressor, Dense) and compressor.lossless
    return dense and asked.kind == "auto" and route.kind == "sum" and rows <= MOST_RIDING
