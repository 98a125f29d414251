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
from gradcomp_jax.compressors import Compressor, RowInfo
from gradcomp_jax.compressors.base import largest_of
from gradcomp_jax.core import passes
from gradcomp_jax.core.layout import Crossing, Group, Layout, Segment
from gradcomp_jax.core.mean import MeanMessage
from gradcomp_jax.core.refusals import refuse_other_rows
from gradcomp_jax.core.step_keys import StepKeys
from gradcomp_jax.per_device import is_per_device


@dataclasses.dataclass(frozen=True)
class Step:
    """Holds what all passes of one update read.

    Attributes:
        layout: what becomes of every leaf.
        leaves: this worker's gradients.
        wanted: the leaves' shapes, with the dtypes that their updates are to have.
        state: the exchange's state before the step.
        keys: makes the random keys of the step, once; called only where something is encoded.
        workers: those who exchange.
    """

    layout: Layout
    leaves: Sequence[Array]
    wanted: Sequence[jax.ShapeDtypeStruct]
    state: Any
    keys: Callable[[], StepKeys]
    workers: co.Workers


@dataclasses.dataclass(frozen=True)
class Piece:
    """Holds one segment on its way out.

    Attributes:
        number: its number among those of its group.
        segment: its leaves.
        memory: what this worker keeps of it.
        code: the compressor's state.
        info: what its rows are encoded with, this worker's statistic among it.
        agreed: the side information of all workers; ``None`` without one.
        follows: what the pass that encodes waits for.
        payload: its encoded rows, leaves ``[rows, ...]``.
        next_code: the compressor's state after encoding.
    """

    number: int
    segment: Segment
    memory: Any
    code: Any
    info: RowInfo
    agreed: Array | None = None
    follows: Any = ()
    payload: Any = None
    next_code: Any = None


@dataclasses.dataclass(frozen=True)
class OutboundMessage:
    """Holds what one group sends of one bucket: the rows of its pieces, one after the other.

    Attributes:
        compressor: encoded the rows.
        group: the group, with its memory.
        number: the group's number in the layout.
        pieces: what is joined in the message.
        collective: resolved, not ``auto``.
        remainder: what becomes of what the downlink loses; ``None`` where nothing is lost.
        payload: all pieces' rows.
        info: the info of those rows, with a key for the downlink and the side information of all workers.
        residual: residual of the rows that this worker owns; ``None`` where owners keep nothing.
        runs: which rows of the group it has, where owners keep something and other buckets have the other rows.
    """

    compressor: Compressor
    group: Group
    number: int
    pieces: Sequence[Piece]
    collective: co.Collective
    remainder: co.Remainder | None
    payload: Any
    info: RowInfo
    residual: Array | None
    runs: Sequence[owners.Run] | None

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
        if self.pieces[0].segment.runs:
            return [self._all_finite(largest)]
        return [self.compressor.finite(p.payload, p.info.statistic, largest) for p in self.pieces]

    def _all_finite(self, largest: float) -> Array:
        statistic = jax.tree.map(lambda *a: jnp.concatenate(a), *[p.info.statistic for p in self.pieces])
        return self.compressor.finite(self.payload, statistic, largest)

    def steps(self, workers: co.Workers) -> co.Steps:
        """Takes the message across the axis."""
        return self.collective.steps(self, workers)


Message = OutboundMessage | MeanMessage


def outbound(step: Step, bucket: Sequence[Sequence[int]], number: int, before: Sequence[Message]) -> list[Message]:
    """Makes the messages of one bucket: one for each group that has segments in it.

    ``bucket`` has for each group the numbers of its segments, and ``before`` the messages of the previous bucket.
    """
    turn = passes.Bucket([payload for m in before for payload in m.payloads])
    crossings = step.layout.crossings_of(bucket)
    messages: dict[int, Message] = {}
    if coded := {n: crossing for n, crossing in crossings.items() if not crossing.is_sum}:
        messages |= encoded(step, bucket, number, coded, turn)
    for n in [n for n in crossings if n not in coded]:
        group, segments = step.layout.groups[n]
        messages[n] = MeanMessage.of(group, [segments[j] for j in bucket[n]], step.leaves, turn)
    return [messages[n] for n in crossings]


def encoded(
    step: Step, bucket: Sequence[Sequence[int]], number: int, crossings: Mapping[int, Crossing], turn: passes.Bucket
) -> dict[int, OutboundMessage]:
    """Encodes some groups of a bucket, in the bucket's turn: returns a message for each of the ``crossings``."""
    keys = step.keys()
    groups = [(n, step.layout.groups[n][0], _pieces(step, n, bucket[n])) for n in crossings]

    def target(group: Group, piece: Piece) -> tuple[Array, kernels.Parts | None]:
        gradient, memory, _ = _sources(group, piece.segment, step.leaves, piece.memory)
        rows = group.memory.compensate(gradient, group.opened(memory))[0]
        return turn.in_turn(rows), turn.parts(group.memory, gradient, memory)

    for n, group, pieces in groups:
        if crossings[n].measures:
            pieces[:] = _measured(group, pieces, [target(group, piece)[0] for piece in pieces])
    if any(group.compressor.side_information for _, group, _ in groups):
        agree([(group, pieces) for _, group, pieces in groups], keys, step.workers)
    messages = {}
    for n, group, pieces in groups:
        own = keys.of_leaves(keys.own, [p.segment.leaves[0] for p in pieces])
        together = group.dealt and bool(pieces[0].segment.runs)
        for i, piece in enumerate([] if together else pieces):
            side = group.compressor.side_of(piece.agreed, step.workers.index)
            info = piece.info._replace(key=own[i], side=side)
            with passes.after(piece.follows):
                rows, parts = target(group, piece)
            payload, next_code = group.encode(piece.segment, rows, piece.code, info._replace(parts=parts))
            refuse_other_rows(group, piece.segment.rows, payload)
            pieces[i] = dataclasses.replace(piece, info=info, payload=payload, next_code=next_code)
        if together:
            pieces[:] = _together(group, pieces, [target(group, piece)[0] for piece in pieces])
        key = keys.of_downlink(number * len(step.layout.groups) + n)
        messages[n] = _joined(step, n, pieces, crossings[n], key)
    return messages


def _measured(group: Group, pieces: Sequence[Piece], targets: Sequence[Array]) -> list[Piece]:
    """Returns pieces with the statistics of their rows."""
    rows = [group.encoded_rows(p.segment, target) for p, target in zip(pieces, targets, strict=True)]
    found = group.compressor.statistics(rows, [p.info for p in pieces], [p.code for p in pieces])
    each = zip(pieces, found, strict=True)
    return [dataclasses.replace(p, info=p.info._replace(statistic=of), follows=of) for p, of in each]


def _together(group: Group, pieces: Sequence[Piece], targets: Sequence[Array]) -> list[Piece]:
    """Returns pieces that are encoded together: the entries of all are found in as few steps as those of one."""
    ends, deals = itertools.accumulate(p.segment.rows for p in pieces), [p.segment.deal for p in pieces]
    payload = group.compressor.encode_all_dealt([t.reshape(-1) for t in targets], [deal for deal in deals if deal])
    each = [co.rows_of(payload, [(end - p.segment.rows, end)]) for p, end in zip(pieces, ends, strict=True)]
    return [dataclasses.replace(p, payload=of, next_code=p.code) for p, of in zip(pieces, each, strict=True)]


def _pieces(step: Step, n: int, members: Sequence[int]) -> list[Piece]:
    """Returns the pieces of one group in a bucket, before anything is known of them but their rows."""
    group, segments = step.layout.groups[n]
    memory, code = step.state.memory[n], step.state.compressor[n]
    return [Piece(j, segments[j], memory[j], code[j], RowInfo(group.counts(segments[j]))) for j in members]


def compensated(group: Group, segment: Segment, leaves: Sequence[Array], kept: Any) -> tuple[Array, Any, Any]:
    """Returns the target of a segment, its memory with the gradient in it, and its memory as it was.

    Every call computes the target again: it is one fused multiply-add of gradient and memory. If several passes shared it,
    it would be held as a dense copy, written and read again, which costs more than reading its sources.
    """
    gradient, memory, old = _sources(group, segment, leaves, kept)
    return *group.memory.compensate(gradient, group.opened(memory)), old


def _sources(group: Group, segment: Segment, leaves: Sequence[Array], kept: Any) -> tuple[Array, Any, Any]:
    """Returns the rows of a segment's gradient, of its memory, and that as it was kept, for the pass that reads them now."""
    values = jax.tree.map(lambda p: p.value, kept, is_leaf=is_per_device)
    sources, old = passes.held(group, (group.sources(segment, leaves), values))
    memory = jax.tree.map(lambda *a: group.beside(segment, a), *old) if segment.parts else old
    return group.join(segment, sources), memory, old


def _joined(step: Step, n: int, pieces: Sequence[Piece], crossing: Crossing, key: Array) -> OutboundMessage:
    """Joins encoded pieces to one message; where only some rows of owners are in it, each at a place of its owner."""
    group, every = step.layout.groups[n]
    segments, rows = [p.segment for p in pieces], [p.segment.rows for p in pieces]
    residual: Any = None
    runs, places = None, None
    if crossing.remainder in ("split", "server"):
        residual = jax.tree.map(lambda p: p.value, step.state.server[n], is_leaf=is_per_device)
        if len(pieces) < len(every):
            starts, total, workers = [s.start for s in segments], sum(s.rows for s in every), step.workers
            runs, places = owners.runs(starts, rows), owners.places(starts, rows, workers.count)
            residual = jax.tree.map(lambda a: owners.take(a, runs, total, workers.index, workers.count), residual)
        residual = group.opened(residual)

    def join(arrays: Sequence[Array]) -> Array:
        return group.joined(segments, arrays) if places is None else owners.spread(arrays, places)

    side = None
    if pieces[0].agreed is not None:
        # The one statistic of a whole tensor is repeated for each of its rows.
        each = [(count, p.agreed) for count, p in zip(rows, pieces, strict=True) if p.agreed is not None]
        side = join([jnp.broadcast_to(agreed, (count, *agreed.shape[1:])) for count, agreed in each])
    payload = jax.tree.map(lambda *a: join(a), *[p.payload for p in pieces])
    info = RowInfo(join([p.info.need("count") for p in pieces]), key, side=side)
    how = crossing.collective, crossing.remainder
    return OutboundMessage(group.compressor, group, n, pieces, *how, payload, info, residual, runs)


def all_finite(messages: Sequence[Message], also: Sequence[Array], workers: co.Workers) -> Array:
    """Returns whether all messages, and the arrays of ``also``, are finite and no sum can overflow: boolean scalar."""
    largest = largest_of(workers.count)
    found = [finite for message in messages for finite in message.finite(largest)]
    return jnp.stack([*found, *(kernels.all_finite(x) for x in also)] or [jnp.array(True)]).all()


def agree(groups: Sequence[tuple[Group, list[Piece]]], keys: StepKeys, workers: co.Workers) -> None:
    """Puts into the pieces what all workers know of each: the maximum or the mean of their statistics, or seeds.

    Statistics of one kind cross in one all-reduce; seeds do not cross.
    """

    def of_kind(kind: str) -> list[list[Array]]:
        agreeing = [pieces for group, pieces in groups if group.compressor.side_information == kind]
        return [[p.info.statistic for p in pieces if p.info.statistic is not None] for pieces in agreeing]

    # All of a group's in one array: each pass that encodes cuts out its own.
    held = [passes.in_memory(jnp.concatenate(of_group)) for of_group in of_kind("max")]
    largest = zip(held, co.pmax(held, workers.axis_name), strict=True)
    total = iter(co.psum(list(itertools.chain(*of_kind("mean"))), workers.axis_name))
    for group, pieces in groups:
        kind, segments = group.compressor.side_information, [p.segment for p in pieces]
        if kind is None:
            continue
        statistics, follows = [p.info.statistic for p in pieces], None
        if kind == "max":
            follows = next(largest)
            ends = list(itertools.accumulate(map(len, statistics)))[:-1]
            statistics, agreed = (jnp.split(of_all, ends) for of_all in follows)
        elif kind == "mean":
            # All tensors of a compressor go together: what follows (an orthogonalization) is slow on small arrays.
            mean = group.compressor.from_mean(jnp.concatenate([next(total) for _ in segments]) / workers.count)
            ends = list(itertools.accumulate(s.rows for s in segments))
            agreed = [mean[end - s.rows : end] for end, s in zip(ends, segments, strict=True)]
        else:
            of_leaf = keys.of_leaves(keys.common, [s.leaves[0] for s in segments])
            agreed = [kernels.row_seeds(k, s.rows) for k, s in zip(of_leaf, segments, strict=True)]
        for i, (piece, own, of_all) in enumerate(zip(pieces, statistics, agreed, strict=True)):
            info = piece.info._replace(statistic=own)
            pieces[i] = dataclasses.replace(piece, info=info, agreed=of_all, follows=follows or (own, of_all))
