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
from gradcomp_jax.per_device import is_per_device
from gradcomp_jax.transforms.outbound import OutboundMessage, compensated


def take_in(
    out: OutboundMessage, came: co.InboundMessage, leaves: Sequence[Array], state: Any, ok: Array, workers: co.Workers
) -> dict[int, Array]:
    """Decodes what came of a message that was sent, and brings the group's state up to date.

    ``state`` is that of the exchange, in lists, of which the entries of the message's segments are replaced. Returns the
    updates of the segments' leaves by number. Where the exchange does not take place (``ok``) they are zeros, and the
    state stays.
    """
    group, n = out.group, out.number
    updates: dict[int, Array] = {}
    received = [group.received_rows(s) for s in out.segments]
    starts = list(itertools.accumulate(received, initial=0))[:-1]
    if came.residual is not None:
        starts = owners.places(out.starts, received, workers.count)
    for i, (j, segment) in enumerate(zip(out.members, out.segments, strict=True)):
        span = (starts[i], starts[i] + received[i])
        like = leaves[segment.leaves[0]] if len(segment.leaves) == 1 else None
        mean = came.mean(span, group.laid(segment, like), ())
        updates |= group.split(segment, jnp.where(ok, mean, 0.0), leaves)
        if group.memory.keeps:
            state.memory[n][j] = _memory(out, i, came, span, leaves, state.memory[n][j], ok)
        after, before = out.states[i], state.compressor[n][j]
        if came.added and jax.tree.leaves(after):
            after = group.compressor.next_state(after, came.mean_payload(span))
        state.compressor[n][j] = _keep_if(ok, after, before, before)
    if came.residual is not None:
        server, runs = state.server[n], owners.runs(out.starts, received)
        new = owners.put(server.value, came.residual, runs, server.rows, workers.index, workers.count)
        state.server[n] = dataclasses.replace(server, value=jnp.where(ok, new, server.value))
    return updates


def _memory(
    out: OutboundMessage, i: int, came: co.InboundMessage, span: co.Span, leaves: Sequence[Array], old: Any, ok: Array
) -> Any:
    """The new memory of the message's segment number i."""
    group, segment, info, code = out.group, out.segments[i], out.infos[i], out.compressor
    target, memory, before = compensated(group, segment, leaves, old, ok)
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
    return _keep_if(ok, group.memory.update(target, sent, sent_mask, memory), before, old)


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
