"""A group whose float32 entries are added up as they are: its leaves go out, their mean comes in, and nothing is kept."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax import collectives as co
from gradcomp_jax._typing import Array
from gradcomp_jax.collectives.messages import Send
from gradcomp_jax.core import passes
from gradcomp_jax.core.layout import Group, Segment


@dataclasses.dataclass(frozen=True)
class MeanMessage:
    """Holds the entries of one group of one bucket.

    Attributes:
        group: the group.
        segments: its segments in this bucket.
        payloads: the entries of each, float32 ``[entries, 1]``.
        joined: all of them, one segment after the other.
    """

    group: Group
    segments: Sequence[Segment]
    payloads: Sequence[Array]
    joined: Array

    @classmethod
    def of(
        cls, group: Group, segments: Sequence[Segment], leaves: Sequence[Array], turn: passes.Bucket
    ) -> "MeanMessage":
        """Makes the message of some segments."""
        each = [turn.in_turn(group.join(s, passes.read_once(group.sources(s, leaves)))) for s in segments]
        return cls(group, segments, each, jnp.concatenate(each) if len(each) > 1 else each[0])

    def finite(self, largest: float) -> list[Array]:
        """Returns for each segment whether its entries are finite and at most ``largest``."""
        return [self.group.compressor.finite(entries, None, largest) for entries in self.payloads]

    def steps(self, workers: co.Workers) -> co.Steps:
        """Adds the entries of all workers."""
        total = yield Send("psum", self.joined, shapes=[s.shape for s in self.segments])
        return co.InboundMessage(total, None, divisor=workers.count)

    def updates(
        self, total: Array, wanted: Sequence[jax.ShapeDtypeStruct], ok: Array, workers: int
    ) -> dict[int, Array]:
        """Returns the updates of its leaves by number: the mean, zeros where the exchange does not take place (``ok``)."""
        order, start, found = passes.InTurn(ok), 0, dict[int, Array]()
        for segment, entries in zip(self.segments, self.payloads, strict=True):
            part = lax.slice_in_dim(total, start, start + entries.size)
            mean = part / workers if workers > 1 else part
            found |= self.group.split(segment, jnp.where(order.update, mean, 0.0), wanted)
            order.made_update(mean)
            start += entries.size
        return found
