"""Small segments side by side, as parts of one: where launching a kernel costs what reading millions of entries does.

State, wire and numbers are the same: segments are joined and taken apart within a step. :mod:`passes` says for which devices.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gradcomp_jax import kernels
from gradcomp_jax._typing import Array
from gradcomp_jax.collectives import owners
from gradcomp_jax.core import passes
from gradcomp_jax.core.layout import Group, Layout, Segment
from gradcomp_jax.core.outbound import Step

SMALL = 2**18
"""Most entries of a part: a larger segment gains less than the copies of it cost."""
LEAST = 8
"""Fewer small segments stay as they are."""
MOST = 2**24
"""Entries of a segment's parts, about."""


class Exchanged(NamedTuple):
    """Holds what an exchange returns.

    Attributes:
        sent: updates by the leaf's number.
        memory: new memories of each group's segments.
        code: new states of the compressor, likewise.
        server: what the owner holds of each group.
        ok: boolean scalar, whether the exchange took place.
    """

    sent: dict[int, Array]
    memory: Sequence[Sequence[Any]]
    code: Sequence[Sequence[Any]]
    server: Sequence[Any]
    ok: Array


def with_parts(layout: Layout) -> Layout:
    """Returns a layout that has the one in which small segments are parts, if that is another one."""
    groups = [(group, _segments(group, segments)) for group, segments in layout.groups]
    return layout._replace(beside=layout._replace(groups=groups)) if groups != layout.groups else layout


def _segments(group: Group, segments: list[Segment]) -> list[Segment]:
    code, parts = group.compressor, list[list[Segment]]()
    if not code.by_row or group.memory.dtype != "float32" or group.view not in ("rows", "dealt"):
        return segments
    small = [s for s in segments if s.size <= SMALL and len(s.leaves) == 1 and not s.shards]
    if len(small) < LEAST:
        return segments
    for segment in small:
        if not parts or sum(s.size for s in parts[-1]) >= MOST:
            parts.append([])
        parts[-1].append(segment)
    large = [dataclasses.replace(s, runs=((s.start, s.start + s.rows),)) for s in segments if s not in small]
    return [*large, *(_of_parts(tuple(of), code.block) for of in parts)]


def _of_parts(parts: tuple[Segment, ...], block: int) -> Segment:
    leaves, rows = tuple(i for part in parts for i in part.leaves), sum(part.rows for part in parts)
    return Segment(
        leaves,
        rows * block,
        rows=rows,
        received=rows,
        start=parts[0].start,
        memory_rows=rows,
        padded=any(part.padded for part in parts),
        deal=kernels.Deal(rows * block, block, rows) if parts[0].deal else None,
        runs=tuple(owners.runs([part.start for part in parts], [part.rows for part in parts])),
        parts=parts,
    )


def exchanged(exchange: Callable[[Step], Exchanged], step: Step, beside: Layout) -> Exchanged:
    """Returns the exchange of a step, with small segments side by side where that is better."""

    def together() -> Exchanged:
        memory, code = (_joined(step.layout, beside, kept) for kept in (step.state.memory, step.state.compressor))
        state = dataclasses.replace(step.state, memory=memory, compressor=code)
        made = exchange(dataclasses.replace(step, layout=beside, state=state))
        memory, code = (_apart(step.layout, beside, kept) for kept in (made.memory, made.code))
        return made._replace(memory=memory, code=code)

    return passes.side_by_side(together, lambda: exchange(step))


def _joined(layout: Layout, beside: Layout, kept: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Returns what is kept of each segment of a layout for those of the other: a list for one with parts."""
    found = []
    for (_, segments), (_, others), of in zip(layout.groups, beside.groups, kept, strict=True):
        by_leaf = {segment.leaves: one for segment, one in zip(segments, of, strict=True)}
        found.append([[by_leaf[p.leaves] for p in s.parts] if s.parts else by_leaf[s.leaves] for s in others])
    return found


def _apart(layout: Layout, beside: Layout, kept: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Inverts :func:`_joined`."""
    found = []
    for (_, segments), (_, others), of in zip(layout.groups, beside.groups, kept, strict=True):
        by_leaf = dict[tuple[int, ...], Any]()
        for segment, one in zip(others, of, strict=True):
            parts = zip(segment.parts, one, strict=True) if segment.parts else [(segment, one)]
            by_leaf |= {part.leaves: each for part, each in parts}
        found.append([by_leaf[segment.leaves] for segment in segments])
    return found
