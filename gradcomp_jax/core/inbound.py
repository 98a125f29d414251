"""Takes in messages: the mean is decoded, every memory keeps what did not go out, and owners keep theirs.

How much all memories of a worker hold is estimated at the end.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax import collectives as co
from gradcomp_jax import kernels
from gradcomp_jax._typing import Array
from gradcomp_jax.collectives import owners
from gradcomp_jax.compressors.base import largest_kept
from gradcomp_jax.core import passes
from gradcomp_jax.core.layout import Group, Layout, Segment
from gradcomp_jax.core.outbound import OutboundMessage, Piece, Step, compensated
from gradcomp_jax.memory import narrow
from gradcomp_jax.per_device import is_per_device


def take_in(
    step: Step, out: OutboundMessage, came: co.InboundMessage, server: Any, ok: Array
) -> tuple[dict[int, Array], list[Piece], Any]:
    """Decodes what came of a message that was sent: the updates of its leaves by number, its pieces and the owner's residual.

    The pieces have their new memories and states. ``server`` is what the owner holds of the group. Where the exchange does not
    take place (``ok``) updates are zeros, and the rest is what :func:`held` leaves of it.
    """
    group, updates, pieces = out.group, dict[int, Array](), list[Piece]()
    received = [p.segment.received for p in out.pieces]
    starts = list(itertools.accumulate(received, initial=0))[:-1]
    if out.runs is not None:
        starts = owners.places([p.segment.start for p in out.pieces], received, step.workers.count)
    order = passes.InTurn(ok)
    for piece, start, rows in zip(out.pieces, starts, received, strict=True):
        segment, memory, span = piece.segment, piece.memory, piece.segment.runs or [(start, start + rows)]
        like = step.leaves[segment.leaves[0]] if len(segment.leaves) == 1 else None
        with passes.after(order.update):
            mean = came.mean(span, group.laid(segment, like), passes.again, order.update)
            updates |= group.split(segment, passes.in_memory(mean) if segment.parts else mean, step.wanted)
        if group.memory.keeps:
            with passes.after(order.update, order.memory):
                memory = _memory(step, group, piece, came, span, order.memory)
            order.made_memory(memory)
        code = piece.next_code
        if came.added and jax.tree.leaves(code):
            code = group.compressor.next_state(code, came.mean_payload(span))
        code = written(ok, code, piece.code, piece.code)
        order.made_update(mean)
        pieces.append(dataclasses.replace(piece, memory=memory, code=code))
    if came.residual is not None:
        server = owners_written(step, out, came.residual, server, ok)
    return updates, pieces, server


def _memory(step: Step, group: Group, piece: Piece, came: co.InboundMessage, span: co.Span, ok: Array) -> Any:
    """Returns the new memory of a piece, as it is kept."""
    dtype = group.memory.dtype
    new, before = _kept(step, group, piece, came, span)
    if dtype != "float32":
        scale = narrow.scales(new, dtype)
        if any(unit is not None for unit in scale):
            # Computed again, with the scales there: between the passes it would be held in float32.
            with passes.after(scale):
                new, before = _kept(step, group, piece, came, span)
        new = narrow.closed(new, dtype, scale, piece.info.need("key"))
    if piece.segment.parts:
        new = _apart(group, piece.segment, passes.in_memory(new))
    new = written(ok, new, held(group, before, step.workers), piece.memory)
    return new if group.compressor.row_shape is None else passes.laid_out(group, new)


def _apart(group: Group, segment: Segment, memory: Any) -> list[Any]:
    """Returns the memory of each of a segment's parts."""
    leaves, treedef = jax.tree.flatten(memory)
    each = zip(*(group.apart(segment, rows) for rows in leaves), strict=True)
    return [jax.tree.unflatten(treedef, of) for of in each]


def _kept(step: Step, group: Group, piece: Piece, came: co.InboundMessage, span: co.Span) -> tuple[Any, Any]:
    """Returns the new memory in float32, and the old one as it was kept."""
    segment, info, code = piece.segment, piece.info, group.compressor
    target, memory, before = compensated(group, segment, step.leaves, piece.memory)
    payload, laid = came.taken(code, piece.payload, span), group.laid(segment)
    once, again = (co.fresh(code, payload, laid, passes.again) for _ in range(2))
    sent, sent_mask = group.decode(segment, once, info), group.sent_mask(segment, again, info)
    if code.pads_nonzero and segment.padded:
        valid = kernels.valid_mask(group.memory_counts(segment), code.block)
        sent, sent_mask = jnp.where(valid, sent, 0.0), sent_mask & valid
    lost = came.lost(span, laid)
    if lost is not None:
        sent = sent - lost
        if came.drops:
            # Entries that no owner kept were not sent after all.
            sent_mask &= came.mean(span, laid, passes.again) != 0
            sent = jnp.where(came.mean(span, laid, passes.again) != 0, sent, 0.0)
    bound = _bound(group, segment, step.wanted)
    if bound is not None:
        sent = carried(sent, bound, group, segment, came, span, step.workers)
    return group.memory.update(target, sent, sent_mask, memory), before


def written(ok: Array, new: Any, old: Any, marks: Any) -> Any:
    """Returns new values where the exchange took place, old ones where it was skipped, with the ``PerDevice`` marks of a tree.

    The last array is written first, and where it matters each array waits for the one after it. An accumulator is made from the
    old velocity, so the velocity can be overwritten in place, without a copy, only once the accumulator is there.
    """
    places, treedef = jax.tree.flatten(marks, is_leaf=is_per_device)
    triples = list(zip(places, jax.tree.leaves(new), jax.tree.leaves(old), strict=True))
    kept: list[Any] = []
    for mark, value, before in reversed(triples):
        after = kernels.chosen(ok, value, before)
        if after.size and len(places) > 1:
            ok = passes.written_before(ok, after)
        kept.append(dataclasses.replace(mark, value=after) if is_per_device(mark) else after)
    return jax.tree.unflatten(treedef, kept[::-1])


def owners_written(step: Step, out: OutboundMessage, residual: Array, old: Any, ok: Array) -> Any:
    """Returns this owner's residual of the group, with new values for the message's rows."""
    group, dtype, workers, new = out.group, out.group.memory.dtype, step.workers, residual
    if dtype != "float32":
        new = narrow.closed(residual, dtype, narrow.scales(residual, dtype), out.info.need("key"))
    values = jax.tree.map(lambda p: p.value, old, is_leaf=is_per_device)
    kept = held(group, values, workers)

    def put(mark: Any, before: Array, rows: Array, held: Array) -> Any:
        if out.runs is not None:
            rows = owners.put(before, rows, out.runs, mark.rows, workers.index, workers.count)
        return dataclasses.replace(mark, value=kernels.chosen(ok, rows, held))

    return jax.tree.map(put, old, values, new, kept, is_leaf=is_per_device)


def carried(
    sent: Array,
    bound: Array | float,
    group: Group,
    segment: Segment,
    came: co.InboundMessage,
    span: co.Span,
    workers: co.Workers,
) -> Array:
    """Returns what counts as sent, less the part of the mean that is beyond the updates' range, as the memory lies.

    Every worker has the same mean and takes all of that part back. Where only an owner has the mean, the owner takes it back N
    times. ``bound`` is the largest magnitude of an update, such as float16's.
    """
    mean = came.mean(span, group.laid(segment), passes.again)
    beyond = mean - jnp.clip(mean, -bound, bound)
    if segment.shards:
        owned = owners.Owners(segment.owners * beyond.shape[0], segment.owners, in_turn=False)
        beyond = owned.place(beyond * segment.owners, workers.index)
    if segment.padded:
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
    if group.memory.dtype != "float32":
        return narrow.bounded(before, most)
    return jax.tree.map(lambda a: jnp.where(jnp.abs(a) <= most, a, jnp.zeros((), a.dtype)), before)


MOST = 2**14
"""Most entries of a tensor that are sampled."""


def ratio_of(layout: Layout, memory: Sequence[Sequence[Any]], gradient: Sequence[Array], before: Any, ok: Array) -> Any:
    """Estimates the norm of a worker's memories over that of its gradient: ``PerDevice`` float32 ``[1]``.

    Both norms are from at most ``MOST`` entries of each tensor, evenly spread, so the estimate costs no pass. It stays
    what it was (``before``) where the exchange was skipped (``ok`` is false), or the sampled entries have no gradient.
    ``memory`` is the new state of each group and segment.
    """
    kept, seen = list[list[Sample]](), list[list[Sample]]()
    for (group, segments), states in zip(layout.groups, memory, strict=True):
        for segment, state in zip(segments, states, strict=True):
            if group.memory.keeps:
                rows = group.memory.held(group.opened(jax.tree.map(lambda p: p.value, state, is_leaf=is_per_device)))
                kept.append([sample(rows)])
                seen.append([sample(gradient[i]) for i in segment.leaves])
    of_memory, of_gradient = sum_of_squares(kept), sum_of_squares(seen)
    ratio = jnp.sqrt(of_memory / jnp.where(of_gradient > 0, of_gradient, 1.0))
    usable = ok & (of_gradient > 0) & jnp.isfinite(ratio)
    return dataclasses.replace(before, value=jnp.where(usable, ratio, before.value))


Sample = tuple[Array, float]
"""Some entries of a tensor, and how many entries each of them stands for."""


def sample(x: Array) -> Sample:
    """Returns a grid of an array's entries: slices without a reshape, which could be a copy."""
    # The leading dimension is thinned out first: whole lines are cheap to read.
    wanted, strides = MOST, []
    for n in reversed(x.shape):
        strides.append(-(-n // min(n, max(1, wanted))))
        wanted //= max(1, -(-n // strides[-1]))
    where = [passes.places(x.shape, stride, axis) for axis, stride in enumerate(reversed(strides))]
    grid = passes.taken(x, where).astype(jnp.float32)
    return grid, x.size / math.prod(grid.shape)


def sum_of_squares(samples: Sequence[Sequence[Sample]]) -> Array:
    """Estimates the sum of the squares of all tensors, from samples of each segment's."""
    if not samples:
        return jnp.zeros((), jnp.float32)
    return passes.side_by_side(functools.partial(_summed_together, samples), functools.partial(_summed, samples))


def _summed(samples: Sequence[Sequence[Sample]]) -> Array:
    zero = jnp.zeros((), jnp.float32)
    return sum((sum((jnp.sum(x * x) * each for x, each in of), zero) for of in samples), zero)


def _summed_together(samples: Sequence[Sequence[Sample]]) -> Array:
    return jnp.sum(passes.joined([(x * x * each).reshape(-1) for of in samples for x, each in of]))
