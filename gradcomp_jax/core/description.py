"""What an exchange sends, from its layout and its collectives alone: its operations, with zeros instead of payloads."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradcomp_jax import collectives as co
from gradcomp_jax._typing import Array
from gradcomp_jax.collectives import owners
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.core.layout import Layout
from gradcomp_jax.core.transport import transport


class _Blank(NamedTuple):
    """Stands for a message without content."""

    compressor: Compressor
    rows: int
    collective: co.Collective

    def steps(self, workers: co.Workers) -> co.Steps:
        """Sends as many zeros as the collective sends of a message."""
        for send in self.collective.sends(self.compressor, self.rows, workers.count):
            yield send._replace(payload=jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), send.payload))
        return co.InboundMessage(None, None)


def describe(layout: Layout, buckets: Sequence[Sequence[int]] | None, workers: co.Workers) -> Array:
    """Puts zeros through every operation of an exchange, without a pass over any tensor; returns the common decision."""
    ok = []
    for bucket in layout.buckets(buckets):
        numbers = [n for n, members in enumerate(bucket) if members]
        groups = [(layout.groups[n][0], [layout.groups[n][1][j] for j in bucket[n]]) for n in numbers]
        for kind, operation in (("max", co.pmax), ("mean", co.psum)):
            agreeing = [(g.compressor, s.rows) for g, segments in groups for s in segments]
            specs = [c.statistic_spec(rows) for c, rows in agreeing if c.side_information == kind]
            size = sum(spec.size for spec in specs if spec is not None)
            operation([jnp.zeros(size)] if size else [], workers.axis_name)
        messages = []
        crossing = layout.crossings_of(bucket)
        for n, (group, segments) in zip(numbers, groups, strict=True):
            rows = [s.rows for s in segments]
            places = [sum(rows[:-1])]
            if crossing[n].remainder in ("split", "server"):
                places = owners.places([s.start for s in segments], rows, workers.count)
            messages.append(_Blank(group.compressor, places[-1] + rows[-1], crossing[n].collective))
        # transport reads nothing of a message but its steps.
        ok.append(transport(messages, jnp.array(False), workers).ok)  # type: ignore[arg-type]
    return jnp.stack(ok).all()
