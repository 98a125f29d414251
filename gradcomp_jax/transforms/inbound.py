"""Takes in messages: the mean is decoded, every memory keeps what did not go out, owners keep theirs."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax import collectives as co
from gradcomp_jax import kernels
from gradcomp_jax._typing import Array
from gradcomp_jax.collectives import owners
from gradcomp_jax.memory import narrow
from gradcomp_jax.transforms import holding, limits
from gradcomp_jax.transforms.outbound import OutboundMessage, compensated
from gradcomp_jax.transforms.writing import owners_written, written


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
    does not take place (``ok``) they are zeros, and the state is what :func:`limits.held` leaves of it.
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
    return holding.memory(group, written(ok[1], new, limits.held(group, before, workers), old))


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
    sent = limits.carried(sent, group, segment, came, span, wanted, ok, workers)
    return group.memory.update(target, sent, sent_mask, memory), before
