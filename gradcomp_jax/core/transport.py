"""Takes messages across the axis: the operations of all their collectives together, as few as possible."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradcomp_jax import collectives as co
from gradcomp_jax._typing import Array
from gradcomp_jax.collectives import fused
from gradcomp_jax.core import passes
from gradcomp_jax.core.outbound import Message


class Received(NamedTuple):
    """Holds the arrays that came in: ``owners``, by all-to-all, and ``everyone``, by all-gather and all-reduce."""

    owners: Sequence[Array] = ()
    everyone: Sequence[Array] = ()


class Transported(NamedTuple):
    """Holds a bucket that was exchanged.

    Attributes:
        messages: the messages that were sent.
        inbound: what came in for each of them.
        ok: boolean scalar, equal on every worker: whether all that crossed was usable.
        received: the arrays that came in.
    """

    messages: Sequence[Message]
    inbound: list[co.InboundMessage]
    ok: Array
    received: Received


def transport(
    messages: Sequence[Message], bad: Array, workers: co.Workers, after: Received | None = None
) -> Transported:
    """Takes every message across the axis: all-to-all, then all-gather, then all-reduce, each at most once.

    ``bad`` (boolean scalar) says whether this worker's gradient is unusable. It is part of the last collective, so that the
    workers' common decision costs no separate message. ``after`` is what came in for the previous bucket; each of these
    collectives waits for it. Otherwise a compiler would combine the collectives of both buckets into one, which waits for
    the later gradients.
    """
    after, axis_name = after or Received(), workers.axis_name
    in_flight = [_InFlight(m.steps(workers)) for m in messages]
    while meeting := _waiting(in_flight, "permute"):
        _go_on(meeting, fused.permute(_arrays(meeting), meeting[0].send.partners, axis_name))
    owned = _waiting(in_flight, "all_to_all")
    to_owners = fused.all_to_all(passes.wait(_arrays(owned), after.owners), axis_name) if owned else []
    _go_on(owned, to_owners)
    gathered, added = _waiting(in_flight, "all_gather"), _waiting(in_flight, "psum")
    bad = jnp.stack([bad, *(c.send.bad for c in gathered if c.send.bad is not None)]).any()
    to_gather, to_add = (passes.wait(_arrays(of), after.everyone) for of in (gathered, added))
    shapes = [c.send.shapes for c in added for _ in jax.tree.leaves(c.send.payload)]
    if to_gather:
        carrier = min(to_gather, key=lambda a: a.dtype.itemsize).dtype
        unsigned = jnp.dtype(f"uint{8 * carrier.itemsize}")
        *came, flags = fused.all_gather([*to_gather, bad.astype(unsigned)], axis_name)
        sums = fused.psum(to_add, axis_name, shapes)
        ok = jnp.max(flags) == 0
    else:
        carrier = to_add[0].dtype if to_add else jnp.dtype(jnp.float32)
        *sums, flags = fused.psum([*to_add, bad.astype(carrier)], axis_name, shapes)
        came, ok = [], flags == 0
    _go_on(gathered, came)
    _go_on(added, sums)
    inbound = [c.inbound for c in in_flight if c.inbound is not None]
    return Transported(messages, inbound, ok, Received(to_owners, [*came, *sums]))


class _InFlight:
    """Holds a message in flight: what its collective sends next, or its result."""

    def __init__(self, steps: co.Steps) -> None:
        self._steps = steps
        self.inbound: co.InboundMessage | None = None
        self.go_on(None)

    def go_on(self, came: Any) -> None:
        """Passes what came in to the collective."""
        try:
            self.send = self._steps.send(came)
        except StopIteration as end:
            self.inbound = end.value


def _waiting(in_flight: Sequence[_InFlight], by: str) -> list[_InFlight]:
    """Returns the messages that wait for this operation."""
    return [c for c in in_flight if c.inbound is None and c.send.by == by]


def _arrays(waiting: Sequence[_InFlight]) -> list[Array]:
    return [a for c in waiting for a in jax.tree.leaves(c.send.payload)]


def _go_on(waiting: Sequence[_InFlight], came: Sequence[Array]) -> None:
    """Gives each message its own of the arrays that came in."""
    rest = iter(came)
    for c in waiting:
        leaves, treedef = jax.tree.flatten(c.send.payload)
        c.go_on(jax.tree.unflatten(treedef, [next(rest) for _ in leaves]))
