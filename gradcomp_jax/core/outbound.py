"""Makes outbound messages: gradient and memory make a target, the target is encoded, and payloads are joined."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
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
from gradcomp_jax.core.layout import Crossing, Group, Layout, Segment
from gradcomp_jax.core.mean import MeanMessage
from gradcomp_jax.core.refusals import refuse_other_rows
from gradcomp_jax.core.step_keys import StepKeys
from gradcomp_jax.memory import narrow
from gradcomp_jax.per_device import is_per_device


@dataclasses.dataclass(frozen=True)
class Piece:
    """Holds one segment on its way out.

    Attributes:
        number: its number among those of its group.
        segment: its leaves.
        start: its first row among all rows of the group.
        memory: what this worker keeps of it.
        code: the compressor's state.
        info: what its rows are encoded with, this worker's statistic among it.
        agreed: the side information of all workers; ``None`` without one.
        payload: its encoded rows, leaves ``[rows, ...]``.
        next_code: the compressor's state after encoding.
    """

    number: int
    segment: Segment
    start: int
    memory: Any
    code: Any
    info: RowInfo
    agreed: Array | None = None
    payload: Any = None
    next_code: Any = None


@dataclasses.dataclass(frozen=True)
class OutboundMessage:
    """Holds what one group sends of one bucket: the rows of its pieces, one after the other.

    Attributes:
        group: compressor, memory, collective and view.
        number: the group's number in the layout.
        pieces: what is joined in the message.
        collective: resolved, not ``auto``.
        remainder: what becomes of what the downlink loses; ``None`` where nothing is lost.
        payload: all pieces' rows.
        info: the info of those rows, with a key for the downlink and the side information of all workers.
        residual: residual of the rows that this worker owns; ``None`` where owners keep nothing.
    """

    group: Group
    number: int
    pieces: Sequence[Piece]
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
        return [p.segment.shape for p in self.pieces]

    @property
    def payloads(self) -> list[Any]:
        """Returns the payload of each piece."""
        return [p.payload for p in self.pieces]

    def finite(self, largest: float) -> list[Array]:
        """Returns for each piece whether what was encoded is finite and at most ``largest``."""
        return [self.compressor.finite(p.payload, p.info.statistic, largest) for p in self.pieces]

    def steps(self, workers: co.Workers) -> co.Steps:
        """Takes the message across the axis."""
        return self.collective.steps(self, workers)


Message = OutboundMessage | MeanMessage


def outbound(
    layout: Layout,
    bucket: Sequence[Sequence[int]],
    number: int,
    leaves: Sequence[Array],
    state: Any,
    keys: Callable[[], StepKeys],
    workers: co.Workers,
    before: Sequence[Message],
) -> list[Message]:
    """Makes the messages of one bucket of a layout: one for each group that has segments in it.

    ``bucket`` has for each group the numbers of its segments, and ``before`` the messages of the previous bucket. ``keys`` are
    made only if something is encoded.
    """
    turn, crossing = passes.Bucket([payload for m in before for payload in m.payloads]), layout.crossings_of(bucket)
    sums = [n for n in crossing if crossing[n].is_sum]
    messages: dict[int, Message] = {}
    if len(sums) < len(crossing):
        coded = {n: _pieces(layout, n, bucket[n], state) for n in crossing if n not in sums}
        messages |= encoded(layout, coded, crossing, number, leaves, state, keys(), workers, turn)
    for n in sums:
        group, segments = layout.groups[n]
        messages[n] = MeanMessage.of(group, [segments[j] for j in bucket[n]], leaves, turn)
    return [messages[n] for n in crossing]


def encoded(
    layout: Layout,
    pieces_of: dict[int, list[Piece]],
    crossing: Mapping[int, Crossing],
    number: int,
    leaves: Sequence[Array],
    state: Any,
    keys: StepKeys,
    workers: co.Workers,
    turn: passes.Bucket,
) -> dict[int, OutboundMessage]:
    """Encodes the pieces of some groups of a bucket, and returns a message for each group."""
    groups = [(n, layout.groups[n][0], pieces) for n, pieces in pieces_of.items()]

    def target(group: Group, piece: Piece) -> Array:
        return turn.in_turn(compensated(group, piece.segment, leaves, piece.memory)[0])

    for _, group, pieces in groups:
        for i, piece in enumerate(pieces):
            rows = group.encoded_rows(piece.segment, target(group, piece))
            statistic = group.compressor.statistic(rows, piece.info, piece.code)
            pieces[i] = dataclasses.replace(piece, info=piece.info._replace(statistic=statistic))
    if any(group.compressor.side_information for _, group, _ in groups):
        agree([(group, pieces) for _, group, pieces in groups], keys, workers)
    messages = {}
    for n, group, pieces in groups:
        own = keys.of_leaves(keys.own, [p.segment.leaves[0] for p in pieces])
        for i, piece in enumerate(pieces):
            side = group.compressor.side_of(piece.agreed, workers.index)
            info = piece.info._replace(key=own[i], side=side)
            with passes.after(piece.info.statistic, piece.agreed):
                rows = target(group, piece)
            payload, next_code = group.encode(piece.segment, rows, piece.code, info)
            refuse_other_rows(group, group.rows(piece.segment), payload)
            pieces[i] = dataclasses.replace(piece, info=info, payload=payload, next_code=next_code)
        key = keys.of_downlink(number * len(layout.groups) + n)
        messages[n] = _joined(group, n, pieces, crossing[n], state.server[n], key, workers)
    return messages


def _pieces(layout: Layout, n: int, members: Sequence[int], state: Any) -> list[Piece]:
    """Returns the pieces of one group in a bucket, before anything is known of them but their rows."""
    group, segments = layout.groups[n]
    starts = layout.starts(n)
    return [
        Piece(j, segments[j], starts[j], state.memory[n][j], state.compressor[n][j], RowInfo(group.counts(segments[j])))
        for j in members
    ]


def _joined(
    group: Group,
    n: int,
    pieces: Sequence[Piece],
    crossing: Crossing,
    server: Any,
    key: Array,
    workers: co.Workers,
) -> OutboundMessage:
    """Joins encoded pieces to one message; where owners have a residual, in the order of the owners."""
    segments, remainder = [p.segment for p in pieces], crossing.remainder
    places, residual = None, None
    if server or remainder in ("split", "server"):
        places, residual = _owned(group, segments, [p.start for p in pieces], remainder, server, workers)

    def join(arrays: Sequence[Array]) -> Array:
        return group.joined(segments, arrays) if places is None else owners.spread(arrays, places)

    side = None
    if pieces[0].agreed is not None:
        # The one statistic of a whole tensor is repeated for each of its rows.
        each = [(group.rows(p.segment), p.agreed) for p in pieces if p.agreed is not None]
        side = join([jnp.broadcast_to(agreed, (rows, *agreed.shape[1:])) for rows, agreed in each])
    payload = jax.tree.map(lambda *a: join(a), *[p.payload for p in pieces])
    info = RowInfo(join([p.info.need("count") for p in pieces]), key, side=side)
    return OutboundMessage(group, n, pieces, crossing.collective, remainder, payload, info, residual)


def compensated(group: Group, segment: Segment, leaves: Sequence[Array], kept: Any) -> tuple[Array, Any, Any]:
    """Returns the target of a segment, its memory with the gradient in it, and its memory as it was.

    Every call computes the target again: it is one fused multiply-add of gradient and memory. If several passes shared it,
    it would be held as a dense copy, written and read again, which costs more than reading its sources.
    """
    values = jax.tree.map(lambda p: p.value, kept, is_leaf=is_per_device)
    sources, old = passes.held(group, (group.sources(segment, leaves), values))
    return *group.memory.compensate(group.join(segment, sources), narrow.opened(old)), old


def all_finite(messages: Sequence[Message], also: Sequence[Array], workers: co.Workers) -> Array:
    """Returns whether all messages, and the arrays of ``also``, are finite and no sum can overflow: boolean scalar."""
    largest = largest_of(workers.count)
    found = [finite for message in messages for finite in message.finite(largest)]
    return jnp.stack([*found, *(kernels.all_finite(x) for x in also)] or [jnp.array(True)]).all()


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
    mark = narrow.values_of(server)
    found = mark.value.shape if is_per_device(mark) else None
    if found is None or found != (mark.held(workers.count), group.compressor.block):
        raise ValueError(
            f"the owners' residual has shape {found} on this worker, which is none of {workers.count} workers: initialise"
            " inside the axis (gradcomp_jax.init_state and init_opt_state do), or use gradcomp_jax.resize_workers after a"
            " change of their number"
        )
    if remainder not in ("split", "server"):
        return None, None
    rows = [group.rows(s) for s in segments]
    runs = owners.runs(starts, rows)
    taken = jax.tree.map(
        lambda p: owners.take(p.value, runs, mark.rows, workers.index, workers.count), server, is_leaf=is_per_device
    )
    return owners.places(starts, rows, workers.count), narrow.opened(taken)


def agree(groups: Sequence[tuple[Group, list[Piece]]], keys: StepKeys, workers: co.Workers) -> None:
    """Puts into the pieces what all workers know of each: the maximum or the mean of their statistics, or seeds.

    Statistics of one kind cross in one all-reduce; seeds do not cross.
    """

    def of_kind(kind: str) -> list[Array]:
        agreeing = [pieces for group, pieces in groups if group.compressor.side_information == kind]
        return [p.info.statistic for pieces in agreeing for p in pieces if p.info.statistic is not None]

    largest = iter(co.pmax(of_kind("max"), workers.axis_name))
    total = iter(co.psum(of_kind("mean"), workers.axis_name))
    for group, pieces in groups:
        kind, segments = group.compressor.side_information, [p.segment for p in pieces]
        if kind is None:
            continue
        if kind == "max":
            agreed = [next(largest) for _ in segments]
        elif kind == "mean":
            # All tensors of a compressor go together: what follows (an orthogonalization) is slow on small arrays.
            mean = group.compressor.from_mean(jnp.concatenate([next(total) for _ in segments]) / workers.count)
            ends = list(itertools.accumulate(group.rows(s) for s in segments))
            agreed = [mean[end - group.rows(s) : end] for end, s in zip(ends, segments, strict=True)]
        else:
            of_leaf = keys.of_leaves(keys.common, [s.leaves[0] for s in segments])
            agreed = [kernels.row_seeds(k, group.rows(s)) for k, s in zip(of_leaf, segments, strict=True)]
        pieces[:] = [dataclasses.replace(p, agreed=a) for p, a in zip(pieces, agreed, strict=True)]
