"""Takes in messages: the mean is decoded, every memory keeps what did not go out, owners keep theirs."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax import collectives as co
from gradcomp_jax import kernels
from gradcomp_jax._typing import Array
from gradcomp_jax.collectives import owners
from gradcomp_jax.compressors.base import largest_kept
from gradcomp_jax.core import passes
from gradcomp_jax.core.layout import Group, Segment
from gradcomp_jax.core.outbound import OutboundMessage, compensated
from gradcomp_jax.memory import narrow
from gradcomp_jax.per_device import is_per_device


def take_in(
    out: OutboundMessage,
    came: co.InboundMessage,
    leaves: Sequence[Array],
    wanted: Sequence[jax.ShapeDtypeStruct],
    state: Any,
    ok: Array,
    workers: co.Workers,
) -> dict[int, Array]:
    """Decodes what came of a message that was sent, and brings the group's state up to date.

    ``wanted`` has the leaves' shapes with the dtypes that updates are to have. ``state`` is that of the exchange, in lists,
    whose entries of these segments are replaced. Returns the updates of the segments' leaves by number. Where the exchange
    does not take place (``ok``) they are zeros, and the state is what :func:`held` leaves of it.
    """
    group, n = out.group, out.number
    updates: dict[int, Array] = {}
    received = [group.received_rows(s) for s in out.segments]
    starts = list(itertools.accumulate(received, initial=0))[:-1]
    if came.residual is not None:
        starts = owners.places(out.starts, received, workers.count)
    turn = kept = ok  # what the next tensor's update, and its memory, wait for on TPU
    for i, (j, segment) in enumerate(zip(out.members, out.segments, strict=True)):
        span = (starts[i], starts[i] + received[i])
        like = leaves[segment.leaves[0]] if len(segment.leaves) == 1 else None
        mean = came.mean(span, group.laid(segment, like), (turn,) * 5)
        updates |= group.split(segment, jnp.where(turn, mean, 0.0), wanted)
        if group.memory.keeps:
            old = state.memory[n][j]
            state.memory[n][j] = _memory(out, i, came, span, (leaves, wanted), old, (turn, kept), workers)
            kept = kernels.follows_on_tpu(kept, jax.tree.leaves(state.memory[n][j])[0])
        after, before = out.states[i], state.compressor[n][j]
        if came.added and jax.tree.leaves(after):
            after = group.compressor.next_state(after, came.mean_payload(span))
        state.compressor[n][j] = written(ok, after, before, before)
        turn = kernels.follows_on_tpu(turn, mean)
    if came.residual is not None:
        state.server[n] = owners_written(out, came.residual, received, state.server[n], ok, workers)
    return updates


def _memory(
    out: OutboundMessage, i: int, came: co.InboundMessage, span: co.Span, leaves: Any, old: Any, ok: Any, workers: Any
) -> Any:
    """The new memory of segment number i, of gradients and what is wanted of them; ``ok`` is one value at two times."""
    group, dtype = out.group, out.group.memory.dtype
    new, before = _kept(out, i, came, span, leaves, old, ok, workers)
    if dtype != "float32":
        scale = narrow.scales(new, dtype)
        if any(unit is not None for unit in scale):
            # Computed anew, with the scales there: between the passes it would be held in float32.
            new, before = _kept(out, i, came, span, leaves, old, (ok, scale), workers)
        new = narrow.closed(new, dtype, scale, out.infos[i].need("key"))
    return passes.memory(group, written(ok[1], new, held(group, before, workers), old))


def _kept(
    out: OutboundMessage, i: int, came: co.InboundMessage, span: co.Span, leaves: Any, old: Any, ok: Any, workers: Any
) -> tuple[Any, Any]:
    """The new memory in float32, and the old one as it was kept; ``ok`` is what they wait for."""
    group, segment, info, code = out.group, out.segments[i], out.infos[i], out.compressor
    gradients, wanted = leaves
    target, memory, before = compensated(group, segment, gradients, old, ok)
    payload, laid = came.taken(code, out.payloads[i], span), group.laid(segment)
    once, again = (co.anew(code, payload, laid, after) for after in (ok, (ok, ok)))
    sent, sent_mask = group.decode(segment, once, info), group.sent_mask(segment, again, info)
    if code.pads_nonzero and group.is_padded(segment):
        valid = kernels.valid_mask(group.memory_counts(segment), code.block)
        sent, sent_mask = jnp.where(valid, sent, 0.0), sent_mask & valid
    lost = came.lost(span, laid)
    if lost is not None:
        sent = sent - lost
        if came.drops:
            # Entries that no owner kept were not sent after all.
            sent_mask &= came.mean(span, laid, (ok, ok)) != 0
            sent = jnp.where(came.mean(span, laid, ok) != 0, sent, 0.0)
    sent = carried(sent, group, segment, came, span, wanted, ok, workers)
    return group.memory.update(target, sent, sent_mask, memory), before


def written(ok: Array, new: Any, old: Any, marks: Any) -> Any:
    """Returns new values where the exchange took place, old ones where it was skipped, with the ``PerDevice`` marks of a tree.

    The last array is written first, and on CPU each array waits for the one after it. An accumulator is made from the old
    velocity, so the velocity can be overwritten in place, without a copy, only once the accumulator is there. The other
    backends write all of them in one pass.
    """
    places, treedef = jax.tree.flatten(marks, is_leaf=is_per_device)
    triples = list(zip(places, jax.tree.leaves(new), jax.tree.leaves(old), strict=True))
    kept: list[Any] = []
    for mark, value, before in reversed(triples):
        after = kernels.chosen(ok, value, before)
        if after.size and len(places) > 1:
            ok = ok & lax.platform_dependent(after.reshape(-1)[0], cpu=_known, default=_always)
        kept.append(dataclasses.replace(mark, value=after) if is_per_device(mark) else after)
    return jax.tree.unflatten(treedef, kept[::-1])


def _known(first: Array) -> Array:
    """Returns true for every number: a dependence that the compiler cannot fold away, because a NaN differs from itself.

    Integers are symmetric here and never have their dtype's least value, which the compiler does not know.
    """
    if jnp.issubdtype(first.dtype, jnp.integer):
        return first != jnp.iinfo(first.dtype).min
    return first == first


def _always(first: Array) -> Array:
    """Returns true, with the same varying axes as :func:`_known`."""
    return (first == first) | True


def owners_written(
    out: OutboundMessage, residual: Array, received: Sequence[int], old: Any, ok: Array, workers: co.Workers
) -> Any:
    """Returns this owner's residual of the group, with new values for the message's rows."""
    group, dtype, runs = out.group, out.group.memory.dtype, owners.runs(out.starts, received)
    new: Any = residual
    if dtype != "float32":
        new = narrow.closed(residual, dtype, narrow.scales(residual, dtype), out.info.need("key"))
    values = jax.tree.map(lambda p: p.value, old, is_leaf=is_per_device)
    kept = held(group, values, workers)

    def put(mark: Any, before: Array, rows: Array, held: Array) -> Any:
        after = owners.put(before, rows, runs, mark.rows, workers.index, workers.count)
        return dataclasses.replace(mark, value=kernels.chosen(ok, after, held))

    return jax.tree.map(put, old, values, new, kept, is_leaf=is_per_device)


def carried(
    sent: Array,
    group: Group,
    segment: Segment,
    came: co.InboundMessage,
    span: co.Span,
    leaves: Sequence[jax.ShapeDtypeStruct],
    after: Any,
    workers: co.Workers,
) -> Array:
    """Returns what counts as sent, less the part of the mean that is beyond the updates' range, as the memory lies.

    Every worker has the same mean and takes all of that part back. Where only an owner has the mean, the owner takes it back N
    times. ``leaves`` have the updates' dtypes, such as float16; the mean waits for ``after``.
    """
    bound = _bound(group, segment, leaves)
    if bound is None:
        return sent
    mean = came.mean(span, group.laid(segment), (after, after, after))
    beyond = mean - jnp.clip(mean, -bound, bound)
    if segment.shards:
        owned = owners.Owners(segment.owners * beyond.shape[0], segment.owners, in_turn=False)
        beyond = owned.place(beyond * segment.owners, workers.index)
    if group.is_padded(segment):
        beyond = jnp.where(kernels.valid_mask(group.memory_counts(segment), group.compressor.block), beyond, 0.0)
    return sent - beyond


def _bound(group: Group, segment: Segment, leaves: Sequence[jax.ShapeDtypeStruct]) -> Array | float | None:
    """Returns the largest magnitude that each entry of an update can have; ``None`` for leaves with float32's range."""
    of_leaf = {i: kernels.range_of(leaves[i].dtype) for i in segment.leaves}
    first, *others = of_leaf.values()
    if all(other == first for other in others):
        return first
    return group.join(segment, {i: jnp.full(leaves[i].shape, m or kernels.LARGEST) for i, m in of_leaf.items()})


def held(group: Group, before: Any, workers: co.Workers) -> Any:
    """Returns a memory as a skipped step leaves it: without entries so large that every later step would be skipped.

    Entries that are not finite, in a state from elsewhere, are removed too. The pass that writes the memory does this; there is
    no other. Estimates stay unchanged, because they must still add up to what all workers have been sent.
    """
    if group.memory.counts_sent:
        return before
    most = largest_kept(workers.count, group.compressor.block)

    def bounded(node: Any) -> Any:
        fits = jnp.abs(narrow.opened(node)) <= most
        if narrow.is_narrow(node):
            # Where a scale is not finite, a zero would not decode to zero.
            scale = jnp.where(jnp.abs(node.scale) <= most, node.scale, 0.0)
            return narrow.Narrow(scale, kernels.chosen(fits, node.values, jnp.zeros((), node.values.dtype)))
        return kernels.chosen(fits, node, jnp.zeros((), node.dtype))

    return jax.tree.map(bounded, before, is_leaf=narrow.is_narrow)
