"""Owners: each worker owns some rows and reduces them.

Owners with a residual take rows in turn: row r of a group belongs to worker r mod N, in every bucket. So a residual
has one place for each of its rows, and buckets may divide a group in any way.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array
from gradcomp_jax.collectives import tpu


@dataclasses.dataclass(frozen=True)
class Owners:
    """Describes the owners of a message's rows.

    Attributes:
        rows: rows of the message.
        workers: N; each worker is an owner.
        in_turn: whether row r belongs to worker r modulo N; otherwise each owns consecutive rows, equally many.
        shapes: shapes of the tensors whose entries the rows are, where any division among owners will do.
    """

    rows: int
    workers: int
    in_turn: bool
    shapes: tpu.Shapes = ()

    @property
    def each(self) -> int:
        """Returns how many rows a worker owns, padding at the end included."""
        return -(-self.rows // self.workers)

    def by_owner(self, tree: Any) -> Any:
        """Returns rows ``[rows, ...]`` as ``[N, each, ...]``: slice i is what worker i owns."""
        return jax.tree.map(lambda a: tpu.by_owner(a, self.workers, self.each, self.in_turn, self.shapes), tree)

    def by_row(self, tree: Any) -> Any:
        """Inverts :meth:`by_owner`, but for the padding."""
        return jax.tree.map(lambda a: tpu.by_row(a, self.in_turn, self.shapes), tree)

    def mine(self, tree: Any, index: Array) -> Any:
        """Returns the rows that worker ``index`` owns, of all rows."""
        # Indexed by the owner's number: the number of its first row may be too large for an index.
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(self.by_owner(a), index, keepdims=False), tree)

    def place(self, tree: Any, index: Array) -> Any:
        """Returns the rows that worker ``index`` owns, with zeros for all others; only for consecutive rows."""

        def placed(a: Array) -> Array:
            fits = 2 * a.shape[0] * self.workers < 2**31
            return lax.platform_dependent(a, index, tpu=self._cut if fits else self._put, default=self._put)

        return jax.tree.map(placed, tree)

    def _put(self, a: Array, index: Array) -> Array:
        zeros = jnp.zeros((self.workers, *a.shape), a.dtype)
        return lax.dynamic_update_index_in_dim(zeros, a, index, 0).reshape(-1, *a.shape[1:])

    def _cut(self, a: Array, index: Array) -> Array:
        """Returns the same as one expression, which TPU computes where it is read; row numbers must fit an index."""
        rows, around = a.shape[0], a.shape[0] * (self.workers - 1)
        padded = lax.pad(a, jnp.zeros((), a.dtype), [(around, around, 0), *[(0, 0, 0)] * (a.ndim - 1)])
        return lax.dynamic_slice_in_dim(padded, around - index * rows, rows * self.workers)


Run = tuple[int, int]
"""Consecutive rows: the first one, and the first one after them."""


def runs(starts: Sequence[int], rows: Sequence[int]) -> list[Run]:
    """Returns the rows of segments, which begin at ``starts`` in rising order, as few runs as possible."""
    result: list[Run] = []
    for start, count in zip(starts, rows, strict=True):
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], start + count)
        else:
            result.append((start, start + count))
    return result


def places(starts: Sequence[int], rows: Sequence[int], workers: int) -> list[int]:
    """Returns where each segment's rows begin in a buffer in which row r's place is r modulo ``workers``."""
    result: list[int] = []
    at, end = 0, None
    for start, count in zip(starts, rows, strict=True):
        if start != end:
            at += -at % workers + start % workers
        result.append(at)
        at, end = at + count, start + count
    return result


def spread(arrays: Sequence[Array], at: Sequence[int]) -> Array:
    """Returns one array ``[rows, ...]`` with each segment's rows at its place, and zeros between them."""
    parts: list[Array] = []
    end = 0
    for place, array in zip(at, arrays, strict=True):
        if place > end:
            parts.append(jnp.zeros((place - end, *array.shape[1:]), array.dtype))
        parts.append(array)
        end = place + array.shape[0]
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def take(residual: Array, chosen: Sequence[Run], rows: int, worker: Array, workers: int) -> Array:
    """Returns this owner's residual of the chosen runs of rows, one run after the other, with zeros for rows of other runs.

    The residual is ``[ceil(rows / N), block]``, of all the rows of a group; its entry s belongs to row ``s * N + worker``.
    """
    if chosen == [(0, rows)]:
        # An owner has zeros beyond the last row, before and after the step.
        return residual
    zero = jnp.zeros((), residual.dtype)
    parts = [
        jnp.where(_within(run, worker, workers)[:, None], lax.slice_in_dim(residual, *_span(run, workers)), zero)
        for run in chosen
    ]
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def put(residual: Array, new: Array, chosen: Sequence[Run], rows: int, worker: Array, workers: int) -> Array:
    """Returns the residual with new values for the rows that :func:`take` returned."""
    if chosen == [(0, rows)]:
        return new
    start = 0
    for run in chosen:
        first, end = _span(run, workers)
        old, part = lax.slice_in_dim(residual, first, end), lax.slice_in_dim(new, start, start + end - first)
        part = jnp.where(_within(run, worker, workers)[:, None], part, old)
        residual = lax.dynamic_update_slice_in_dim(residual, part, first, 0)
        start += end - first
    return residual


def _span(run: Run, workers: int) -> tuple[int, int]:
    return run[0] // workers, -(-run[1] // workers)


def _within(run: Run, worker: Array, workers: int) -> Array:
    first, end = _span(run, workers)
    row = (first + lax.iota(jnp.int32, end - first)) * workers + worker.astype(jnp.int32)
    return (row >= run[0]) & (row < run[1])
