"""The exchange: per-device gradients in, the averaged update out, what was not sent in explicit state."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from gradcomp_jax import _compat, kernels
from gradcomp_jax import collectives as co
from gradcomp_jax import memory as mem
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.collectives import routes
from gradcomp_jax.compressors import Compressor, dense
from gradcomp_jax.per_device import PerDevice, is_per_device
from gradcomp_jax.transforms.plan import Part, Piece, Select, gains, path_name, pieces


class ExchangeState(NamedTuple):
    """State of :func:`exchange`.

    Attributes:
        step: int32 scalar, updates seen, skipped ones included.
        skipped: int32 scalar, exchanges skipped because some worker's gradient was not finite.
        memory: for each part and piece, the memory as :class:`~gradcomp_jax.per_device.PerDevice` float32 rows.
        compressor: for each part and piece, the compressor's own state.
        server: for each part, the owners' residual (``PerDevice`` of kind ``share``) or ``()``.
    """

    step: Array
    skipped: Array
    memory: tuple
    compressor: tuple
    server: tuple


def exchange(
    compressor: Compressor,
    *,
    axis_name: AxisName | None,
    memory: mem.Memory | None = None,
    route: co.Route | str = "auto",
    select: Select | None = None,
    dense_compressor: Compressor | None = None,
    key: Any = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages compressed gradients over an axis and keeps what was not sent.

    On worker :math:`i`: the memory makes a target :math:`p^i` of the gradient, the worker sends :math:`C(p^i)`, and
    every worker's update is the mean of what arrived. Law: in every step, the mean over the workers of what the
    memories hold, plus the server residual, plus the sum of all updates, equals the sum of all mean gradients (of the
    unbiased codes without memory it holds in expectation).

    Takes per-device gradients (see :func:`gradcomp_jax.local_value_and_grad`), returns updates that are equal on every
    worker, in the gradients' dtype. Local clipping and weight decay go before it, optimizers after it. Works under
    ``shard_map`` (``check_vma`` on or off), ``pmap`` and ``vmap(axis_name=...)``.

    A gradient with a NaN or an infinity on any worker: all workers skip that exchange together. The update is zero, the
    memories stay as they were, ``skipped`` goes up.

    State: :class:`ExchangeState`; memories are float32 and per device. With a ``server`` remainder, initialise inside
    the axis (:func:`gradcomp_jax.init_state` does), because the owners' shares depend on the number of workers.
    Wire: the payloads, one buffer for each word width, and one word for the common decision to skip.

    Args:
        compressor: encodes the selected leaves, each by itself.
        axis_name: the axis to average over, or ``None`` for the local round trip of one worker.
        memory: what stays behind; ``residual()`` by default.
        route: ``"auto"``, ``"gather"``, ``"two_phase"``, ``"sum"``, or a :class:`~gradcomp_jax.collectives.Route`.
        select: ``select(path, leaf) -> bool``, which leaves to compress. By default those with two or more dimensions
            for which the payload is smaller than the dense leaf.
        dense_compressor: for the leaves left out, which cross joined together; float32 by default.
        key: seed (int) or typed JAX key of all randomness. The same key gives the same bits on every run.

    Raises:
        ValueError: at construction, if compressor, memory and route do not go together; when traced, if the gradients
            are already reduced over ``axis_name``.
        NameError: when traced outside the axis.
    """
    memory = mem.residual() if memory is None else memory
    dense_compressor = dense() if dense_compressor is None else dense_compressor
    on_dense = memory.on_dense(lossless=dense_compressor.lossless)
    parts = (
        Part(compressor, memory, co.as_route(route)),
        Part(dense_compressor, on_dense, co.auto(second_encoding=True)),
    )
    chosen = gains(compressor, dense_compressor) if select is None else select

    def plan(tree: PyTree) -> list[tuple[Part, list[Piece]]]:
        return list(zip(parts, pieces(tree, chosen), strict=True))

    def init(params: PyTree) -> ExchangeState:
        workers = _compat.axis_size(axis_name) or 1
        memories, states, servers = [], [], []
        for part, members in plan(params):
            memories.append(tuple(_init_memory(part, p, axis_name) for p in members))
            states.append(tuple(part.compressor.init((p.size,)) for p in members))
            servers.append(_init_server(part, members, workers, axis_name))
        zero = jnp.zeros((), jnp.int32)
        return ExchangeState(zero, zero, tuple(memories), tuple(states), tuple(servers))

    def update(
        updates: PyTree, state: ExchangeState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, ExchangeState]:
        del params, extra
        leaves, treedef = jax.tree.flatten(updates)
        workers = _bound_size(axis_name)
        _refuse_reduced(updates, axis_name)
        if not leaves:
            return updates, state._replace(step=state.step + 1)
        worker_key = jax.random.fold_in(_as_key(key), _compat.axis_index(axis_name))
        encoded = _encode(plan(updates), leaves, state, worker_key, axis_name)
        parcels = [_parcel(e, state, worker_key, workers) for e in encoded if e.members]
        finite = [e.part.compressor.finite(p, s) for e in encoded for p, s in zip(e.payloads, e.locals, strict=True)]
        bad = ~jnp.stack(finite or [jnp.array(True)]).all()
        deliveries, ok = co.cross(parcels, bad, axis_name=axis_name)
        arrived = iter(deliveries)
        memories, states, servers = [], [], []
        for old_memory, old_state, old_server, e in zip(
            state.memory, state.compressor, state.server, encoded, strict=True
        ):
            delivery = next(arrived) if e.members else None
            new = [_absorb(e, j, delivery, leaves, old, ok) for j, old in enumerate(old_memory)]
            memories.append(tuple(m for m, _ in new))
            states.append(_keep_if(ok, e.states, old_state, old_state))
            server = old_server
            if delivery is not None and delivery.server is not None:
                server = PerDevice(jnp.where(ok, delivery.server, old_server.value), old_server.rows, "share")
            servers.append(server)
            for _, part_updates in new:
                for i, value in part_updates.items():
                    leaves[i] = value
        skipped = state.skipped + jnp.where(ok, 0, 1).astype(jnp.int32)
        result = ExchangeState(state.step + 1, skipped, tuple(memories), tuple(states), tuple(servers))
        return jax.tree.unflatten(treedef, leaves), result

    return optax.GradientTransformationExtraArgs(init, update)


class _Encoded(NamedTuple):
    """One part after encoding: everything by piece."""

    part: Part
    members: list[Piece]
    locals: list[Array | None]
    shared: list[Array | None]
    payloads: list[Any]
    states: tuple
    number: int


def _as_key(key: Any) -> Array:
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    return jax.random.key(key)


def _bound_size(axis_name: AxisName | None) -> int:
    size = _compat.axis_size(axis_name)
    if size is None:
        raise NameError(
            f"the axis {axis_name!r} is not bound here: call update inside jax.shard_map, jax.pmap or"
            f" jax.vmap(axis_name={axis_name!r}), or build the transformation with axis_name=None for one worker"
        )
    return size


def _refuse_reduced(updates: PyTree, axis_name: AxisName | None) -> None:
    """A gradient that does not vary over the axis was summed by somebody: there is nothing left to compress."""
    if not _compat.tracks_varying(axis_name):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        if not _compat.is_varying(leaf, axis_name):
            raise ValueError(
                f"the gradient {path_name(path)!r} is already reduced over {axis_name!r}: inside jax.shard_map, "
                "jax.grad with"
                " respect to replicated parameters inserts a dense all-reduce of its own. Differentiate with"
                f" gradcomp_jax.local_value_and_grad(loss, axis_name={axis_name!r}), or cast the parameters first with"
                f" jax.lax.pcast(params, {axis_name!r}, to='varying')"
            )


def _init_memory(part: Part, piece: Piece, axis_name: AxisName | None) -> Any:
    block = part.compressor.block
    rows = kernels.row_count(piece.size, block)
    zeros = _compat.varying(part.memory.init(jnp.zeros((rows, block), jnp.float32)), axis_name)
    return jax.tree.map(lambda a: PerDevice(a, rows), zeros)


def _init_server(part: Part, members: list[Piece], workers: int, axis_name: AxisName | None) -> Any:
    if not members or not routes.keeps_server_residual(part.route, part.compressor, part.memory):
        return ()
    block = part.compressor.block
    rows = sum(kernels.row_count(p.size, block) for p in members)
    return PerDevice(_compat.varying(jnp.zeros((-(-rows // workers), block), jnp.float32), axis_name), rows, "share")


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
    sources = {i: leaves[i] if leaves[i].size % block else leaves[i].reshape(-1, block) for i in piece.leaves}
    sources, old, _ = lax.optimization_barrier((sources, _values(kept), after))
    target, memory = part.memory.compensate(piece.join(sources, block), old)
    return target, memory, old


def _encode(
    planned: list[tuple[Part, list[Piece]]],
    leaves: Sequence[Array],
    state: ExchangeState,
    worker_key: Array,
    axis_name: AxisName | None,
) -> list[_Encoded]:
    """Statistics (those that are shared in one collective) and payloads of every piece."""
    counts, locals_ = [], []
    for (part, members), kept in zip(planned, state.memory, strict=True):
        counts.append([kernels.valid_counts(p.size, part.compressor.block) for p in members])
        locals_.append(
            [
                part.compressor.measure(_target(part, piece, leaves, m, ())[0], c)
                for piece, m, c in zip(members, kept, counts[-1], strict=True)
            ]
        )
    agreeing = [ls if part.compressor.agrees else [] for (part, _), ls in zip(planned, locals_, strict=True)]
    agreed = iter(co.pmax([a for ls in agreeing for a in ls if a is not None], axis_name))
    result = []
    for number, (part, members) in enumerate(planned):
        shared = [next(agreed) if agreeing[number] else None for _ in members]
        payloads, states, rows = [], [], []
        for j, piece in enumerate(members):
            # Axis index, then leaf, then step: no two of them share a stream.
            piece_key = jax.random.fold_in(jax.random.fold_in(worker_key, piece.leaves[0]), state.step)
            payload, new_state = part.compressor.encode(
                _target(part, piece, leaves, state.memory[number][j], locals_[number][j])[0],
                state.compressor[number][j],
                piece_key,
                count=counts[number][j],
                local=locals_[number][j],
                shared=shared[j],
            )
            payloads.append(payload)
            states.append(new_state)
            per_row = shared[j]
            rows.append(None if per_row is None else jnp.broadcast_to(per_row, counts[number][j].shape))
        result.append(_Encoded(part, members, locals_[number], rows, payloads, tuple(states), number))
    return result


def _parcel(e: _Encoded, state: ExchangeState, worker_key: Array, workers: int) -> co.Parcel:
    """One payload for all pieces of a part: rows after rows."""
    block = e.part.compressor.block
    count = jnp.concatenate([kernels.valid_counts(p.size, block) for p in e.members])
    shared = None if e.shared[0] is None else jnp.concatenate([s for s in e.shared if s is not None])
    route = routes.resolve(e.part.route, e.part.compressor, count.shape[0], workers)
    remainder = routes.remainder_of(route, e.part.compressor, e.part.memory, workers)
    server = None
    if remainder == "server":
        server = state.server[e.number].value
        share = -(-count.shape[0] // workers)
        if server.shape != (share, block):
            raise ValueError(
                f"the server residual has shape {server.shape} on this worker, expected {(share, block)} for {workers} "
                "workers:"
                " initialise inside the axis (gradcomp_jax.init_state does), or use gradcomp_jax.resize_workers after a"
                " change of their number"
            )
    # 2**31 - 1 - index is no leaf's number: the second encoding's stream is its own.
    back_key = jax.random.fold_in(jax.random.fold_in(worker_key, 2**31 - 1 - e.number), state.step)
    payload = jax.tree.map(lambda *a: jnp.concatenate(a) if len(a) > 1 else a[0], *e.payloads)
    return co.Parcel(e.part.compressor, route, remainder, payload, count, shared, back_key, server)


def _absorb(
    e: _Encoded, j: int, delivery: co.Delivery | None, leaves: Sequence[Array], old: Any, ok: Array
) -> tuple[Any, dict[int, Array]]:
    """New memory of piece j, and its leaves' updates; the old memory and zeros where the exchange was skipped."""
    if delivery is None:
        raise AssertionError("a part with pieces has a delivery")
    part, piece, block = e.part, e.members[j], e.part.compressor.block
    sizes = [kernels.row_count(p.size, block) for p in e.members]
    span = (sum(sizes[:j]), sum(sizes[: j + 1]))
    mean = delivery.mean(span)
    updates = piece.split(jnp.where(ok, mean, 0.0), leaves)
    if not part.memory.keeps:
        return old, updates
    sent = part.compressor.decode(e.payloads[j], shared=e.shared[j])
    left = part.compressor.carried(e.payloads[j], shared=e.shared[j])
    if delivery.rounding is not None:
        # Entries that no owner kept were not sent after all.
        left &= mean != 0
        sent = jnp.where(mean != 0, sent, 0.0) - delivery.rounding(span)
    target, memory, before = _target(part, piece, leaves, old, ok)
    return _keep_if(ok, part.memory.absorb(target, sent, left, memory), before, old), updates


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
        kept.append(PerDevice(after, mark.rows, mark.kind) if isinstance(mark, PerDevice) else after)
    return jax.tree.unflatten(treedef, kept[::-1])


def _known(first: Array) -> Array:
    """True of every number: a dependence that the compiler cannot fold away, because a NaN differs from itself."""
    return first == first


def _always(first: Array) -> Array:
    """True, and as varying over the axis as the other answer."""
    return (first == first) | True
