"""Which leaves go together through which compressor, and how they become rows."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from gradcomp_jax import kernels
from gradcomp_jax._typing import Array
from gradcomp_jax.collectives import AllReduce, Collective, ReduceScatter, Remainder, TwoPhase
from gradcomp_jax.collectives.auto import MOST_RIDING, may_ride
from gradcomp_jax.collectives.messages import Laid
from gradcomp_jax.compressors import Compressor, RowInfo
from gradcomp_jax.compressors.dense import Dense
from gradcomp_jax.core.shards import Shards
from gradcomp_jax.memory import Memory, narrow

View = Literal["rows", "dealt", "columns", "tree"]


@dataclasses.dataclass(frozen=True)
class Segment:
    """Describes one vector to compress: a single leaf, or several leaves joined end to end.

    Attributes:
        leaves: the leaves' numbers in the tree.
        size: entries.
        shards: the shards of a parameter that lies along the workers' axis; each worker owns one.
        periods: lengths after which the structure of the vector repeats.
        shape: shape of the leaf, where it is a single one.
        rows: how many rows its group encodes, for all owners.
        received: how many rows of the mean a worker receives: all, or those of its shard.
        start: its first row among those that a worker receives of the group.
        memory_rows: how many rows its memory has.
        padded: whether its rows hold more than its entries.
        deal: how the vector, or each shard of it, is dealt out over the rows; ``None`` where it is not.
        runs: the runs of rows that it has among those of the group, in a layout in which some segments have parts.
        parts: small segments whose rows it has, one part after the other; see :mod:`gradcomp_jax.core.beside`.
    """

    leaves: tuple[int, ...]
    size: int
    shards: Shards | None = None
    periods: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    rows: int = 0
    received: int = 0
    start: int = 0
    memory_rows: int = 0
    padded: bool = False
    deal: kernels.Deal | None = None
    runs: tuple[tuple[int, int], ...] = ()
    parts: tuple["Segment", ...] = ()

    @property
    def owners(self) -> int:
        """Returns the number of workers that it is divided among; 1 where every worker wants all of it."""
        return self.shards.count if self.shards else 1


class Crossing(NamedTuple):
    """Says how a group crosses.

    Attributes:
        collective: how payloads cross; never ``auto``.
        remainder: what becomes of what the downlink loses; ``None`` where nothing is lost.
        is_sum: whether adding up float32 entries as they are is the whole exchange: nothing is encoded, and nothing is kept.
        may_ride: whether it may be two phases too, where it has few rows and another group takes two phases.
        measures: whether the code has a statistic, which takes a pass before the one that encodes.
    """

    collective: Collective
    remainder: Remainder | None = None
    is_sum: bool = False
    may_ride: bool = False
    measures: bool = False


@dataclasses.dataclass(frozen=True)
class Group:
    """Combines a compressor with its memory and collective.

    Rows that are encoded are float32 ``[rows, block]``. Memories lie as the leaves do in every view, so partition specs,
    checkpoints and a change of the number of workers need not know about dealing.

    Attributes:
        compressor: encodes rows.
        memory: what stays behind.
        collective: how payloads cross.
        view: which entries make a row, see :func:`~gradcomp_jax.exchange`.
    """

    compressor: Compressor
    memory: Memory
    collective: Collective
    view: View = "rows"

    def __post_init__(self) -> None:
        """Refuses combinations that break a law."""
        self.collective.check(self.compressor, self.memory)
        if isinstance(self.collective, ReduceScatter) and self.view not in ("rows", "dealt"):
            raise ValueError(
                f"a reduce-scatter divides tensors by owner, view={self.view!r} otherwise; use view='rows'"
            )

    def crossing(self, segments: Sequence[Segment], workers: int) -> Crossing:
        """Returns how segments of this group cross; where there are none, the collective stays as it was asked for."""
        if not segments:
            return Crossing(self.collective)
        code = self.compressor
        chosen = self.collective.resolve(code, sum(s.rows for s in segments), workers)
        plain = isinstance(code, Dense) and code.lossless and not self.memory.keeps and self.view == "rows"
        return Crossing(
            chosen,
            chosen.remainder_of(code, self.memory, workers),
            is_sum=plain and isinstance(chosen, AllReduce),
            may_ride=may_ride(self.collective, chosen, code),
            measures=code.measures_largest or type(code).statistic is not Compressor.statistic,
        )

    @property
    def dealt(self) -> bool:
        """Returns whether entries are dealt out over the rows."""
        return self.view in ("dealt", "tree")

    def placed(self, segments: Sequence[Segment]) -> list[Segment]:
        """Returns segments that have their rows in this group."""
        found, start, block = list[Segment](), 0, self.compressor.block
        for segment in segments:
            size = segment.size // segment.owners
            kept, deal = kernels.row_count(size, block), None
            if self.dealt:
                deal = kernels.Deal(kept * block, block, kernels.dealt_rows(kept * block, block, segment.periods))
            received = deal.rows if deal else kept
            placed = dataclasses.replace(
                segment,
                rows=received * segment.owners,
                received=received,
                start=start,
                memory_rows=kept * segment.owners,
                padded=kept * block != size,
                deal=deal,
            )
            found.append(placed)
            start += received
        return found

    def memory_counts(self, segment: Segment) -> Array:
        """Returns how many entries of each row of the memory are not padding: int32 ``[rows]``."""
        return jnp.tile(kernels.valid_counts(segment.size // segment.owners, self.compressor.block), segment.owners)

    def counts(self, segment: Segment) -> Array:
        """Returns how many entries of each encoded row are not padding: int32 ``[rows]``."""
        if segment.parts:
            return jnp.concatenate([self.counts(part) for part in segment.parts])
        if not segment.deal:
            return self.memory_counts(segment)
        rows = segment.deal.rows
        each, left = divmod(segment.size // segment.owners, rows)
        one = each + (jax.lax.iota(jnp.int32, rows) < left).astype(jnp.int32)
        return jnp.tile(one, segment.owners)

    def laid(self, segment: Segment, like: Array | None = None) -> Laid:
        """Returns the layout that a mean is wanted in, the memory's or a leaf's; ``None`` where rows are not dealt."""
        if not segment.deal:
            return None
        width = self.compressor.block
        if like is not None and like.size == segment.size and not segment.padded and like.ndim > 1:
            width = max(like.shape[-1], 1)
        return segment.deal, width

    def sources(self, segment: Segment, leaves: Sequence[Array]) -> dict[int, Array]:
        """Returns a segment's leaves, from which :meth:`join` makes its rows.

        Where rows are only a reshape, the reshape comes first: a backend whose layout is not linear then copies once, not once
        for each pass.
        """
        reshaped = self.view in ("rows", "dealt") and len(segment.leaves) == 1 and not segment.shards
        free, block = reshaped and not segment.padded, self.compressor.block
        return {i: leaves[i].reshape(-1, block) if free else leaves[i] for i in segment.leaves}

    def join(self, segment: Segment, leaves: Mapping[int, Array]) -> Array:
        """Returns the float32 rows of a segment's leaves, given by their number in the tree, as the memory lies."""
        if segment.parts:
            return self.beside(segment, [self.join(part, leaves) for part in segment.parts])
        block, first = self.compressor.block, leaves[segment.leaves[0]]
        if segment.shards:
            # Each owner's shard is made into rows by itself, and its last row is filled up.
            flat = segment.shards.flat(first).astype(jnp.float32)
            padding = segment.memory_rows // segment.owners * block - flat.shape[1]
            return jnp.pad(flat, ((0, 0), (0, padding))).reshape(-1, block)
        if self.view == "columns" and first.ndim:
            return kernels.as_rows(jnp.moveaxis(first, -1, 0), block)
        if len(segment.leaves) > 1:
            first = jnp.concatenate([leaves[i].reshape(-1).astype(jnp.float32) for i in segment.leaves])
        return kernels.as_rows(first, block)

    def split(self, segment: Segment, rows: Array, like: Sequence[jax.ShapeDtypeStruct]) -> dict[int, Array]:
        """Inverts :meth:`join`: maps a leaf's number to an array of the leaf's dtype and shape, or of an owner's shard."""
        if segment.parts:
            apart = zip(segment.parts, self.apart(segment, rows), strict=True)
            return {i: leaf for part, of in apart for i, leaf in self.split(part, of, like).items()}
        first = segment.leaves[0]
        leaf = like[first]
        if segment.shards:
            shard = kernels.from_rows(rows, (leaf.size // segment.shards.count,), leaf.dtype)
            return {first: segment.shards.unflat(shard, leaf.shape)}
        if self.view == "columns" and leaf.ndim and len(segment.leaves) == 1:
            turned = kernels.from_rows(rows, (leaf.shape[-1], *leaf.shape[:-1]), leaf.dtype)
            return {first: jnp.moveaxis(turned, 0, -1)}
        if len(segment.leaves) == 1:
            held = self.compressor.is_sparsifier or self.compressor.scales
            return {first: kernels.from_rows(rows, leaf.shape, leaf.dtype, held=held)}
        flat, start, result = rows.reshape(-1), 0, {}
        for i in segment.leaves:
            part = jax.lax.slice(flat, (start,), (start + like[i].size,))
            result[i] = kernels.narrowed(part.reshape(like[i].shape), like[i].dtype)
            start += like[i].size
        return result

    def beside(self, segment: Segment, rows: Sequence[Array]) -> Array:
        """Returns the rows of a segment's parts side by side: dealt ones in the lines of one vector."""
        if not segment.deal:
            return jnp.concatenate(rows)
        deals = [part.deal for part in segment.parts if part.deal]
        lines = [deal.lines(of.reshape(-1)) for deal, of in zip(deals, rows, strict=True)]
        return jnp.concatenate(lines, axis=1).reshape(-1, self.compressor.block)

    def apart(self, segment: Segment, rows: Array) -> list[Array]:
        """Inverts :meth:`beside`."""
        ends = list(itertools.accumulate(part.rows for part in segment.parts))[:-1]
        if not segment.deal:
            # As stretches of a vector, parts are cut together: as rows of one array each would be a kernel.
            block = self.compressor.block
            return [of.reshape(-1, block) for of in jnp.split(rows.reshape(-1), [end * block for end in ends])]
        lines = jnp.split(rows.reshape(segment.deal.block, -1), ends, axis=1)
        deals = [part.deal for part in segment.parts if part.deal]
        return [of.reshape(-1)[: d.size].reshape(-1, d.block) for d, of in zip(deals, lines, strict=True)]

    def opened(self, kept: Any) -> Any:
        """Returns the float32 rows of a memory, or of what owners hold, as it is kept between two steps."""
        return kept if self.memory.dtype == "float32" else narrow.opened(kept)

    def encoded_rows(self, segment: Segment, rows: Array) -> Array:
        """Returns the rows to encode, from rows that lie as the memory does: float32 ``[rows, block]``."""
        if not segment.deal:
            return rows
        flat = rows.reshape(segment.owners, -1)
        return jax.vmap(segment.deal.blocks)(flat).reshape(-1, self.compressor.block)

    def encode(self, segment: Segment, rows: Array, state: Any, info: RowInfo) -> tuple[Any, Any]:
        """Returns payload and state of rows that lie as the memory does."""
        if not segment.deal or segment.owners > 1:
            return self.compressor.encode(self.encoded_rows(segment, rows), state, info)
        return self.compressor.encode_dealt(rows.reshape(-1), segment.deal, state, info)

    def decode(self, segment: Segment, payload: Any, info: RowInfo) -> Array:
        """Returns a worker's own payload as rows that lie as the memory does."""
        if not segment.deal:
            return self.compressor.decode(payload, info)
        if segment.owners == 1:
            return self.compressor.decode_dealt(payload, segment.deal, self.compressor.block, info)
        by_owner = self.compressor.decode(payload, info).reshape(segment.owners, -1, self.compressor.block)
        return jax.vmap(segment.deal.flat)(by_owner).reshape(-1, self.compressor.block)

    def sent_mask(self, segment: Segment, payload: Any, info: RowInfo) -> Array:
        """Returns which entries of :meth:`decode` are not zero: boolean."""
        if not segment.deal:
            return self.compressor.sent_mask(payload, info)
        return self.decode(segment, payload, info) != 0

    def joined(self, segments: Sequence[Segment], arrays: Sequence[Array]) -> Array:
        """Returns one array of all segments' rows ``[rows, ...]``: segment after segment, or owner after owner."""
        if segments[0].runs:
            return _in_place(segments, arrays)
        if len(arrays) == 1 or not isinstance(self.collective, ReduceScatter):
            return jnp.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        by_owner = [a.reshape(s.owners, -1, *a.shape[1:]) for s, a in zip(segments, arrays, strict=True)]
        return jnp.concatenate(by_owner, axis=1).reshape(-1, *arrays[0].shape[1:])


def _in_place(segments: Sequence[Segment], arrays: Sequence[Array]) -> Array:
    """Returns one array of all segments' rows, each at its place in the group."""
    placed = []
    for segment, array in zip(segments, arrays, strict=True):
        ends = itertools.accumulate(end - start for start, end in segment.runs)
        placed += [(start, array[at - (end - start) : at]) for (start, end), at in zip(segment.runs, ends, strict=True)]
    return jnp.concatenate([array for _, array in sorted(placed, key=lambda one: one[0])])


class Layout(NamedTuple):
    """Says what becomes of every leaf.

    Attributes:
        groups: every group, with its segments.
        averaged: leaves that are the workers' mean already.
        crossings: how each group crosses.
        beside: a layout in which small segments of a group are parts of one; ``None`` where no group has many.
    """

    groups: list[tuple[Group, list[Segment]]]
    averaged: list[int]
    crossings: list[Crossing]
    beside: "Layout | None" = None

    def buckets(self, leaves: Sequence[Sequence[int]] | None) -> list[list[list[int]]]:
        """Returns for each bucket of leaves (``None``: one bucket) and group the numbers of its segments.

        A segment goes with the last of its leaves.
        """
        if leaves is None:
            return [[list(range(len(segments))) for _, segments in self.groups]]
        of_leaf = {i: b for b, members in enumerate(leaves) for i in members}
        places = [[max(of_leaf[i] for i in s.leaves) for s in segments] for _, segments in self.groups]
        used = sorted({place for of_group in places for place in of_group}) or [0]
        return [[[j for j, place in enumerate(of) if place == b] for of in places] for b in used]

    def crossings_of(self, bucket: Sequence[Sequence[int]]) -> dict[int, Crossing]:
        """Returns how each group crosses that has segments in a bucket, by its number.

        A small dense group takes two phases if another group does, which saves a collective.
        """
        chosen = {n: self.crossings[n] for n, members in enumerate(bucket) if members}
        if any(isinstance(crossing.collective, TwoPhase) for crossing in chosen.values()):
            for n in [n for n, crossing in chosen.items() if crossing.may_ride]:
                if sum(self.groups[n][1][j].rows for j in bucket[n]) <= MOST_RIDING:
                    chosen[n] = Crossing(TwoPhase())
        return chosen
