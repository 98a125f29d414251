"""One bucket of an exchange on its way across the axis."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradcomp_jax import collectives as co
from gradcomp_jax import kernels
from gradcomp_jax._typing import Array, AxisName
from gradcomp_jax.collectives import routes
from gradcomp_jax.compressors.base import largest_of
from gradcomp_jax.transforms.passes import Encoded, Streams, encode, parcel
from gradcomp_jax.transforms.plan import Plan


class Sent(NamedTuple):
    """One bucket that has crossed.

    Attributes:
        encoded: its parts.
        numbers: of each part's pieces that are in it.
        deliveries: of the parts that have any.
        ok: boolean scalar, equal on every worker: whether everything in it was finite.
        arrived: what came in.
    """

    encoded: list[Encoded]
    numbers: Sequence[Sequence[int]]
    deliveries: list[co.Delivery]
    ok: Array
    arrived: co.Arrived

    def arrivals(self) -> Iterator[tuple[int, Encoded, Sequence[int], co.Delivery]]:
        """Number, encoding, pieces and delivery of each part that has pieces in the bucket."""
        arrived = iter(self.deliveries)
        for n, (e, pieces) in enumerate(zip(self.encoded, self.numbers, strict=True)):
            if pieces:
                yield n, e, pieces, next(arrived)


def send(
    plan: Plan,
    numbers: Sequence[Sequence[int]],
    leaves: Sequence[Array],
    state: Any,
    streams: Streams,
    axis_name: AxisName | None,
    *,
    bucket: int,
    also: Sequence[Array],
    before: Sent | None,
) -> Sent:
    """Encodes one bucket of a plan and takes it across the axis.

    Args:
        plan: of all leaves.
        numbers: of each part's pieces in this bucket.
        leaves: of the gradient.
        state: of the exchange.
        streams: of this step.
        axis_name: the axis.
        bucket: its number.
        also: what does not cross and must be finite as well.
        before: the bucket before.
    """
    parts = [(part, at(members, js)) for (part, members), js in zip(plan.parts, numbers, strict=True)]
    memories, states = (
        [at(of, js) for of, js in zip(every, numbers, strict=True)] for every in (state.memory, state.compressor)
    )
    starts = [at(plan.starts(n), js) for n, js in enumerate(numbers)]
    payloads = jax.tree.leaves([e.payloads for e in before.encoded]) if before else []
    encoded = encode(parts, starts, leaves, memories, states, streams, axis_name, bucket=bucket, after=payloads)
    sending = [e for e in encoded if e.members]
    servers = [server for e, server in zip(encoded, state.server, strict=True) if e.members]
    parcels = _together(sending, [parcel(e, server, streams) for e, server in zip(sending, servers, strict=True)])
    largest = largest_of(streams.workers)
    finite = [
        e.part.compressor.finite(p, s, largest) for e in encoded for p, s in zip(e.payloads, e.locals, strict=True)
    ]
    finite += [kernels.all_finite(x) for x in also]
    bad = ~jnp.stack(finite or [jnp.array(True)]).all()
    return Sent(
        encoded, numbers, *co.cross(parcels, bad, axis_name=axis_name, after=before.arrived if before else None)
    )


def _together(encoded: Sequence[Encoded], parcels: Sequence[co.Parcel]) -> list[co.Parcel]:
    """The parcels, of which a small dense one goes by two phases where another does: a collective less."""
    if not any(p.route.kind == "two_phase" for p in parcels):
        return list(parcels)
    return [
        dataclasses.replace(p, route=co.two_phase())
        if routes.rides_along(e.part.route, p.route, p.compressor, p.rows)
        else p
        for e, p in zip(encoded, parcels, strict=True)
    ]


def at(of: Sequence[Any], numbers: Sequence[int]) -> tuple:
    """Some members of a sequence, by their numbers."""
    return tuple(of[j] for j in numbers)
