"""Makes outbound messages: gradient and memory make a target, the target is encoded, and payloads are joined."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax import collectives as co
from gradcomp_jax import kernels
from gradcomp_jax._typing import Array
from gradcomp_jax.collectives import owners
from gradcomp_jax.compressors import RowInfo
from gradcomp_jax.compressors.base import largest_of
from gradcomp_jax.core import passes
from gradcomp_jax.core.layout import Group, Layout, Segment
from gradcomp_jax.core.refusals import refuse_other_rows
from gradcomp_jax.core.step_keys import StepKeys
from gradcomp_jax.memory import narrow
from gradcomp_jax.per_device import is_per_device


@dataclasses.dataclass(frozen=True)
class OutboundMessage:
    """Holds what one group sends of one bucket: the rows of its segments there, one segment after the other.

    Attributes:
        group: compressor, memory, collective and view.
        number: the group's number in the layout.
        members: the segments' numbers among those of the group.
        segments: the segments.
        starts: the number of each segment's first row among all rows of the group.
        payloads: the payload of each segment, leaves ``[rows, ...]``.
        infos: the info of each segment, as this worker encoded it.
        states: the compressor's states after encoding.
        collective: resolved, not ``auto``.
        remainder: what becomes of what the downlink loses; ``None`` where nothing is lost.
        payload: all segments' rows.
        info: the info of those rows, with a key for the downlink and the side information of all workers.
        residual: residual of the rows that this worker owns; ``None`` where owners keep nothing.
    """

    group: Group
    number: int
    members: Sequence[int]
    segments: Sequence[Segment]
    starts: Sequence[int]
    payloads: list[Any]
    infos: list[RowInfo]
    states: list[Any]
    collective: co.Collective
    remainder: co.Remainder | None
    payload: Any
    info: RowInfo
    residual: Array | None

    @property
    def compressor(self) -> Any:
        """Returns the compressor of the group."""
        return self.group.compressor

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of the segments' leaves."""
        return [s.shape for s in self.segments]

    def steps(self, workers: co.Workers) -> co.Steps:
        """Takes the message across the axis."""
        return self.collective.steps(self, workers)


def outbound(
    layout: Layout,
    bucket: Sequence[Sequence[int]],
    number: int,
    leaves: Sequence[Array],
    state: Any,
    keys: StepKeys,
    workers: co.Workers,
    before: Sequence[OutboundMessage],
) -> list[OutboundMessage]:
    """Encodes one bucket of a layout: a message for each group that has segments in it.

    ``bucket`` has for each group the numbers of its segments, and ``before`` the messages of the previous bucket. A compiler
    that makes one kernel of several buckets' passes (XLA:TPU) would make all of them wait for the last gradient. So each
    entry waits for the payloads before it, which costs no pass.
    """
    numbers = [n for n, members in enumerate(bucket) if members]
    groups = [(layout.groups[n][0], [layout.groups[n][1][j] for j in bucket[n]]) for n in numbers]
    memories = [[state.memory[n][j] for j in bucket[n]] for n in numbers]
    states = [[state.compressor[n][j] for j in bucket[n]] for n in numbers]
    there = co.are_there(jax.tree.leaves([m.payloads for m in before]))

    def target(group: Group, segment: Segment, kept: Any, after: Any) -> Array:
        found = compensated(group, segment, leaves, kept, after)[0]
        return found if there is None else jnp.where(there, found, 0.0)

    counts = [[RowInfo(group.counts(s)) for s in segments] for group, segments in groups]
    statistics = [
        [
            group.compressor.statistic(group.encoded_rows(segment, target(group, segment, kept, ())), info, code_state)
            for segment, kept, info, code_state in zip(segments, *of_group, strict=True)
        ]
        for (group, segments), *of_group in zip(groups, memories, counts, states, strict=True)
    ]
    sides = side_information(groups, statistics, keys, workers)
    collectives = resolved(groups, workers)
    result = []
    for g, (n, (group, segments)) in enumerate(zip(numbers, groups, strict=True)):
        payloads, infos, after = [], [], []
        own = keys.of_leaves(keys.own, [s.leaves[0] for s in segments])
        for j, segment in enumerate(segments):
            info = counts[g][j]._replace(
                key=own[j],
                statistic=statistics[g][j],
                side=group.compressor.side_of(sides[g][j], workers.index),
            )
            rows = target(group, segment, memories[g][j], (statistics[g][j], sides[g][j]))
            payload, code_state = group.encode(segment, rows, states[g][j], info)
            refuse_other_rows(group, segment, payload)
            payloads.append(payload)
            infos.append(info)
            after.append(code_state)
        starts = layout.starts(n)
        collective, remainder = collectives[g]
        places, residual = _owned(group, segments, [starts[j] for j in bucket[n]], remainder, state.server[n], workers)

        def join(
            arrays: Sequence[Array], group: Group = group, segments: Any = segments, places: Any = places
        ) -> Array:
            return group.joined(segments, arrays) if places is None else owners.spread(arrays, places)

        side = None
        if sides[g][0] is not None:
            # The one statistic of a whole tensor is repeated for each of its rows.
            rows_of = zip(segments, sides[g], strict=True)
            side = join([jnp.broadcast_to(a, (group.rows(s), *a.shape[1:])) for s, a in rows_of if a is not None])
        key = keys.of_downlink(number * len(layout.groups) + n)
        result.append(
            OutboundMessage(
                group,
                n,
                bucket[n],
                segments,
                [starts[j] for j in bucket[n]],
                payloads,
                infos,
                after,
                collective,
                remainder,
                payload=jax.tree.map(lambda *a: join(a), *payloads),
                info=RowInfo(join([c.need("count") for c in counts[g]]), key, side=side),
                residual=residual,
            )
        )
    return result


def compensated(
    group: Group, segment: Segment, leaves: Sequence[Array], kept: Any, after: Any
) -> tuple[Array, Any, Any]:
    """Returns the target of a segment, its memory with the gradient in it, and its memory as it was.

    Every call computes the target again: it is one fused multiply-add of gradient and memory. If several passes shared it,
    it would be held as a dense copy, written and read again, which costs more than reading its sources. The barrier, which
    contains what the pass has to wait for, keeps the compiler from seeing that two calls compute the same. Where rows are only
    a reshape, the reshape comes first: a backend whose layout is not linear (TPU) then copies once, not once for each pass.
    """
    block = group.compressor.block
    reshaped = group.view in ("rows", "dealt") and len(segment.leaves) == 1 and not segment.shards
    free = reshaped and not group.is_padded(segment)
    sources = {i: leaves[i].reshape(-1, block) if free else leaves[i] for i in segment.leaves}
    values = jax.tree.map(lambda p: p.value, kept, is_leaf=is_per_device)
    sources, old = passes.sources(group, (sources, values), after)
    return *group.memory.compensate(group.join(segment, sources), narrow.opened(old)), old


def all_finite(messages: Sequence[OutboundMessage], also: Sequence[Array], workers: co.Workers) -> Array:
    """Returns whether all messages, and the arrays of ``also``, are finite and no sum can overflow: boolean scalar."""
    largest = largest_of(workers.count)
    found = [
        m.compressor.finite(payload, info.statistic, largest)
        for m in messages
        for payload, info in zip(m.payloads, m.infos, strict=True)
    ]
    return jnp.stack([*found, *(kernels.all_finite(x) for x in also)] or [jnp.array(True)]).all()


def resolved(
    groups: Sequence[tuple[Group, Sequence[Segment]]], workers: co.Workers
) -> list[tuple[co.Collective, co.Remainder | None]]:
    """Returns the collective of each group. A small dense group takes two phases if another does, which saves a collective."""
    rows = [sum(group.rows(s) for s in segments) for group, segments in groups]
    chosen = [g.collective.resolve(g.compressor, n, workers.count) for (g, _), n in zip(groups, rows, strict=True)]
    remainders = [
        c.remainder_of(g.compressor, g.memory, workers.count) for (g, _), c in zip(groups, chosen, strict=True)
    ]
    if any(isinstance(c, co.TwoPhase) for c in chosen):
        chosen = [
            co.TwoPhase() if co.rides_along(group.collective, c, group.compressor, n) else c
            for (group, _), c, n in zip(groups, chosen, rows, strict=True)
        ]
    return list(zip(chosen, remainders, strict=True))


def _owned(
    group: Group,
    segments: Sequence[Segment],
    starts: Sequence[int],
    remainder: co.Remainder | None,
    server: Any,
    workers: co.Workers,
) -> tuple[list[int] | None, Array | None]:
    """Returns where each segment's rows begin, so that owners can take them in turn, and this owner's residual of them.

    Raises:
        ValueError: if the state was made for another number of workers, or for none.
    """
    keeps = remainder in ("split", "server")
    mark = narrow.values_of(server)
    if not keeps and not is_per_device(mark):
        return None, None
    found = mark.value.shape if is_per_device(mark) else None
    if found is None or found != (mark.held(workers.count), group.compressor.block):
        raise ValueError(
            f"the owners' residual has shape {found} on this worker, which is none of {workers.count} workers: initialise"
            " inside the axis (gradcomp_jax.init_state and init_opt_state do), or use gradcomp_jax.resize_workers after a"
            " change of their number"
        )
    if not keeps:
        return None, None
    rows = [group.rows(s) for s in segments]
    runs = owners.runs(starts, rows)
    taken = jax.tree.map(
        lambda p: owners.take(p.value, runs, mark.rows, workers.index, workers.count), server, is_leaf=is_per_device
    )
    return owners.places(starts, rows, workers.count), narrow.opened(taken)


def side_information(
    groups: Sequence[tuple[Group, Sequence[Segment]]], statistics: list[list[Any]], keys: StepKeys, workers: co.Workers
) -> list[list[Array | None]]:
    """Returns what all workers know of each segment: the maximum or the mean of their statistics, or seeds.

    Statistics of one kind cross in one all-reduce; seeds do not cross.
    """

    def of_kind(kind: str) -> list[Array]:
        agreeing = [statistics[g] for g, (group, _) in enumerate(groups) if group.compressor.side_information == kind]
        return [a for of_group in agreeing for a in of_group]

    largest = iter(co.pmax(of_kind("max"), workers.axis_name))
    total = iter(co.psum(of_kind("mean"), workers.axis_name))
    result: list[list[Array | None]] = []
    for group, segments in groups:
        kind = group.compressor.side_information
        if kind is None:
            result.append([None for _ in segments])
        elif kind == "max":
            result.append([next(largest) for _ in segments])
        elif kind == "mean":
            # All tensors of a compressor go together: what follows (an orthogonalization) is slow on small arrays.
            mean = group.compressor.from_mean(jnp.concatenate([next(total) for _ in segments]) / workers.count)
            ends = [sum(group.rows(s) for s in segments[: j + 1]) for j in range(len(segments))]
            result.append([mean[end - group.rows(s) : end] for end, s in zip(ends, segments, strict=True)])
        else:
            of_leaf = keys.of_leaves(keys.common, [s.leaves[0] for s in segments])
            result.append([kernels.row_seeds(k, group.rows(s)) for k, s in zip(of_leaf, segments, strict=True)])
    return result
