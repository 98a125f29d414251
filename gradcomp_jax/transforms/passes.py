"""The passes of an exchange over gradient and memory: statistics and payloads before it, memory and updates after it."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax import _compat, kernels
from gradcomp_jax import collectives as co
from gradcomp_jax._typing import Array, AxisName
from gradcomp_jax.collectives import routes
from gradcomp_jax.per_device import is_per_device
from gradcomp_jax.transforms import in_turn
from gradcomp_jax.transforms.plan import Part, Piece

_LAST = 2**31 - 1


class Streams(NamedTuple):
    """Keys of one step.

    Attributes:
        own: of this worker.
        common: the same on every worker.
        worker: this worker's number.
        workers: how many there are.
        step: int32 scalar.
    """

    own: Array
    common: Array
    worker: Array
    workers: int
    step: Array

    @classmethod
    def of(cls, key: Any, step: Array, axis_name: AxisName | None, inner_axis_name: AxisName | None) -> "Streams":
        """From a seed or a typed JAX key; the devices of one worker have other parts of a tensor, and other numbers."""
        typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        base, worker = key if typed else jax.random.key(key), _compat.axis_index(axis_name)
        if inner_axis_name is not None:
            base = jax.random.fold_in(base, _compat.axis_index(inner_axis_name))
        # The last number is no worker's and no leaf's.
        workers = _compat.axis_size(axis_name) or 1
        return cls(jax.random.fold_in(base, worker), jax.random.fold_in(base, _LAST), worker, workers, step)

    def leaf(self, stream: Array, number: int) -> Array:
        """Axis index (in the stream), then leaf, then step: no two of them share a key."""
        return jax.random.fold_in(jax.random.fold_in(stream, number), self.step)


class Encoded(NamedTuple):
    """One part after encoding: everything by piece.

    Attributes:
        part: compressor, memory, route and view.
        members: its pieces, of those in this bucket.
        starts: the number of each piece's first row among all rows of the part.
        locals: each worker's own statistics.
        shared: what all workers know, ``[rows, ...]`` or ``[1]``, or ``None``.
        own: the same as this worker encodes with.
        payloads: what this worker sends.
        states: the compressor's.
        number: of the part, counted on from bucket to bucket.
    """

    part: Part
    members: Sequence[Piece]
    starts: Sequence[int]
    locals: list[Array | None]
    shared: list[Array | None]
    own: list[Array | None]
    payloads: list[Any]
    states: list[Any]
    number: int


class Absorbed(NamedTuple):
    """One part after the exchange: new ``memory``, ``compressor`` and ``server`` state, and ``updates`` by leaf."""

    memory: tuple
    compressor: tuple
    server: Any
    updates: dict[int, Array]


def _values(tree: Any) -> Any:
    return jax.tree.map(lambda p: p.value, tree, is_leaf=is_per_device)


def _target(part: Part, piece: Piece, leaves: Sequence[Array], kept: Any, after: Any) -> tuple[Array, Any, Any]:
    """What ought to be sent of a piece, its memory with the gradient in it, and its memory as it was.

    Computed anew at every call: a target is a fused multiply-add away from gradient and memory. Used in several passes
    it would be held, a dense copy written and read again, when reading its sources costs less. The barrier, with what
    the pass has to wait for in it, keeps the compiler from seeing that two calls compute the same. Where rows are a mere
    reshape it comes first: a backend whose layout is not linear (TPU) then copies once, not once for each pass.
    """
    block = part.compressor.block
    free = part.view in ("rows", "dealt") and len(piece.leaves) == 1 and not part.padded(piece) and not piece.cut
    sources = {i: leaves[i].reshape(-1, block) if free else leaves[i] for i in piece.leaves}
    sources, old, _ = lax.optimization_barrier((sources, _values(kept), after))
    target, memory = part.memory.compensate(part.join(piece, sources), old)
    return target, memory, old


def encode(
    parts: Sequence[tuple[Part, Sequence[Piece]]],
    starts: Sequence[Sequence[int]],
    leaves: Sequence[Array],
    memories: Sequence[tuple],
    states: Sequence[tuple],
    streams: Streams,
    axis_name: AxisName | None,
    *,
    bucket: int,
    after: Sequence[Array] = (),
) -> list[Encoded]:
    """Statistics (those that are shared in one collective of a kind) and payloads of every piece of a bucket.

    ``after``: payloads of the bucket before. A compiler that makes one kernel of the passes of several buckets (XLA:TPU) would
    make all of them wait for the last gradient; so each entry waits for the payloads before it, at no pass's cost.
    """
    counts = [[part.counts(p) for p in members] for part, members in parts]
    there = co.are_there(after)

    def target(part: Part, piece: Piece, kept: Any, after: Any) -> Array:
        found = _target(part, piece, leaves, kept, after)[0]
        return found if there is None else jnp.where(there, found, 0.0)

    own = [
        [
            part.compressor.measure(part.blocks(piece, target(part, piece, m, ())), c, s)
            for piece, m, c, s in zip(members, memories[n], counts[n], states[n], strict=True)
        ]
        for n, (part, members) in enumerate(parts)
    ]
    shared = _agree(parts, own, counts, streams, axis_name)
    result = []
    for n, (part, members) in enumerate(parts):
        payloads, after, mine = [], [], []
        for j, piece in enumerate(members):
            mine.append(part.compressor.for_worker(shared[n][j], streams.worker))
            payload, state = part.encode(
                piece,
                target(part, piece, memories[n][j], (own[n][j], shared[n][j])),
                states[n][j],
                streams.leaf(streams.own, piece.leaves[0]),
                count=counts[n][j],
                local=own[n][j],
                shared=mine[j],
            )
            payloads.append(payload)
            after.append(state)
        number = bucket * len(parts) + n
        result.append(Encoded(part, members, starts[n], own[n], shared[n], mine, payloads, after, number))
    return result


def _agree(
    parts: Sequence[tuple[Part, Sequence[Piece]]],
    own: list[list[Array | None]],
    counts: list[list[Array]],
    streams: Streams,
    axis_name: AxisName | None,
) -> list[list[Array | None]]:
    """What all workers know of each piece: the maximum or the mean of their statistics, or seeds."""
    workers = _compat.axis_size(axis_name) or 1

    def of_kind(kind: str) -> list[Array]:
        agreeing = [own[n] for n, (part, _) in enumerate(parts) if part.compressor.agrees == kind]
        return [a for statistics in agreeing for a in statistics if a is not None]

    largest = iter(co.pmax(of_kind("max"), axis_name))
    total = iter(co.psum(of_kind("mean"), axis_name))
    result: list[list[Array | None]] = []
    for n, (part, members) in enumerate(parts):
        code = part.compressor
        agreed: list[Array | None] = [None for _ in members]
        if code.agrees == "max":
            agreed = [next(largest) for _ in members]
        elif code.agrees == "mean" and members:
            # All tensors of a compressor at once: what settles a mean (an orthogonalization) is slow on small arrays.
            settled = code.settle(jnp.concatenate([next(total) for _ in members]) / workers)
            ends = [sum(c.size for c in counts[n][: j + 1]) for j in range(len(members))]
            agreed = [settled[e - c.size : e] for e, c in zip(ends, counts[n], strict=True)]
        elif code.seeded:
            keys = [streams.leaf(streams.common, p.leaves[0]) for p in members]
            agreed = [kernels.row_seeds(k, c.size) for k, c in zip(keys, counts[n], strict=True)]
        result.append(agreed)
    return result


def parcel(e: Encoded, server: Any, streams: Streams) -> co.Parcel:
    """One payload for all pieces of a part: rows after rows."""
    code, workers, rows = e.part.compressor, streams.workers, [e.part.rows(p) for p in e.members]
    route = routes.resolve(e.part.route, code, sum(rows), workers)
    remainder = routes.remainder_of(route, code, e.part.memory, workers)
    residual, of_owners = None, remainder in ("settle", "server")
    if of_owners or is_per_device(server):
        held = _residual(server, code, workers)
        if of_owners:
            residual = in_turn.take(held, in_turn.runs(e.starts, rows), server.rows, streams.worker, workers)

    def join(arrays: Sequence[Array]) -> Array:
        if residual is None:
            return e.part.joined(e.members, arrays)
        return in_turn.spread(arrays, in_turn.places(e.starts, rows, workers))

    shared = None
    if e.shared[0] is not None:
        # One statistic for a whole tensor is one for each of its rows.
        by_row = [(n, s) for n, s in zip(rows, e.shared, strict=True) if s is not None]
        shared = join([jnp.broadcast_to(s, (n, *s.shape[1:])) for n, s in by_row])
    # Counted down from the end: no leaf's number, so the second encoding's stream is its own.
    back_key = streams.leaf(streams.own, _LAST - e.number)
    payload = jax.tree.map(lambda *a: join(a), *e.payloads)
    count = join([e.part.counts(p) for p in e.members])
    return co.Parcel(code, route, remainder, payload, count, shared, back_key, residual)


def _residual(server: Any, code: Any, workers: int) -> Array:
    """The owner's residual of all rows of a part.

    Raises:
        ValueError: if the state was made for another number of workers, or for none.
    """
    found = server.value.shape if is_per_device(server) else None
    if found is None or found != (server.held(workers), code.block):
        raise ValueError(
            f"the owners' residual has shape {found} on this worker, which is none of {workers} workers: initialise inside"
            " the axis (gradcomp_jax.init_state does), or use gradcomp_jax.resize_workers after a change of their number"
        )
    return server.value


def absorb(
    e: Encoded,
    delivery: co.Delivery,
    leaves: Sequence[Array],
    memory: tuple,
    state: tuple,
    server: Any,
    ok: Array,
    streams: Streams,
) -> Absorbed:
    """New state of a part, and its leaves' updates; the old state and zeros where the exchange was skipped."""
    updates: dict[int, Array] = {}
    memories, states, owned = [], list(e.states), [e.part.owned_rows(p) for p in e.members]
    starts = list(itertools.accumulate(owned, initial=0))[:-1]
    if delivery.server is not None:
        starts = in_turn.places(e.starts, owned, streams.workers)
    for j, (piece, old) in enumerate(zip(e.members, memory, strict=True)):
        span = (starts[j], starts[j] + owned[j])
        like = leaves[piece.leaves[0]] if len(piece.leaves) == 1 else None
        mean = delivery.mean(span, e.part.laid(piece, like), ())
        updates |= e.part.split(piece, jnp.where(ok, mean, 0.0), leaves)
        memories.append(_remember(e, j, delivery, span, leaves, old, ok) if e.part.memory.keeps else old)
        if delivery.payload is not None and jax.tree.leaves(states[j]):
            states[j] = e.part.compressor.next_state(states[j], delivery.payload(span))
    if delivery.server is not None:
        chosen = in_turn.runs(e.starts, owned)
        after = in_turn.put(server.value, delivery.server, chosen, server.rows, streams.worker, streams.workers)
        server = dataclasses.replace(server, value=jnp.where(ok, after, server.value))
    return Absorbed(tuple(memories), _keep_if(ok, tuple(states), state, state), server, updates)


def _remember(
    e: Encoded,
    j: int,
    delivery: co.Delivery,
    span: tuple[int, int],
    leaves: Sequence[Array],
    old: Any,
    ok: Array,
) -> Any:
    """The new memory of piece j."""
    part, piece, code = e.part, e.members[j], e.part.compressor
    target, memory, before = _target(part, piece, leaves, old, ok)
    payload = e.payloads[j] if delivery.settled is None else delivery.settled(e.payloads[j], span)
    laid = part.laid(piece)
    once, again = (co.anew(code, payload, laid, after) for after in (ok, (ok, ok)))
    sent = part.decode(piece, once, e.own[j])
    left = part.carried(piece, again, e.own[j])
    if code.fills and part.padded(piece):
        valid = kernels.valid_mask(part.kept_counts(piece), code.block)
        sent, left = jnp.where(valid, sent, 0.0), left & valid
    if delivery.rounding is not None:
        sent = sent - delivery.rounding(span, laid)
        if delivery.drops:
            # Entries that no owner kept were not sent after all.
            left &= delivery.mean(span, laid, (ok, ok)) != 0
            sent = jnp.where(delivery.mean(span, laid, ok) != 0, sent, 0.0)
    return _keep_if(ok, part.memory.absorb(target, sent, left, memory), before, old)


def _keep_if(ok: Array, new: Any, old: Any, marks: Any) -> Any:
    """New values where the exchange took place, old ones where it was skipped, with the ``PerDevice`` marks of a tree.

    The last array is written first, and on CPU each waits for the one behind it: an accumulator is made of the old
    velocity, so the velocity can only be overwritten in place, without a copy, once the accumulator is there. The other
    backends write all of them in one pass.
    """
    places, treedef = jax.tree.flatten(marks, is_leaf=is_per_device)
    triples = list(zip(places, jax.tree.leaves(new), jax.tree.leaves(old), strict=True))
    kept: list[Any] = []
    for mark, value, before in reversed(triples):
        after = jnp.where(ok, value, before)
        if after.size and len(places) > 1:
            ok = ok & lax.platform_dependent(after.reshape(-1)[0], cpu=_known, default=_always)
        kept.append(dataclasses.replace(mark, value=after) if is_per_device(mark) else after)
    return jax.tree.unflatten(treedef, kept[::-1])


def _known(first: Array) -> Array:
    """True of every number: a dependence that the compiler cannot fold away, because a NaN differs from itself."""
    return first == first


def _always(first: Array) -> Array:
    """True, and as varying over the axis as the other answer."""
    return (first == first) | True
