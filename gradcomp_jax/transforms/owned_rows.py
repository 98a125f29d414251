"""Rows that owners take in turn: row r of a group belongs to worker r mod N, whichever rows a bucket has.

So an owner's residual has one place for each of its rows, and buckets may divide a group as they like.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array

Run = tuple[int, int]
"""The first of some rows that follow one another, and the first one after them."""


def runs(starts: Sequence[int], rows: Sequence[int]) -> list[Run]:
    """Returns the rows of segments, which begin at ``starts`` in rising order, as few runs."""
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
    """Returns one array ``[rows, ...]`` with each segment's rows from its place on, and zeros between them."""
    parts: list[Array] = []
    end = 0
    for place, array in zip(at, arrays, strict=True):
        if place > end:
            parts.append(jnp.zeros((place - end, *array.shape[1:]), array.dtype))
        parts.append(array)
        end = place + array.shape[0]
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def take(residual: Array, chosen: Sequence[Run], rows: int, worker: Array, workers: int) -> Array:
    """Returns what this owner has of some runs of rows, one run after the other, zeros for rows of other runs.

    Args:
        residual: ``[ceil(rows / N), block]`` of all rows of a group; entry s belongs to row ``s * N + worker``.
        chosen: runs of rows.
        rows: how many the group has in all.
        worker: this worker's number.
        workers: N.
    """
    if chosen == [(0, rows)]:
        # An owner has zeros beyond the last row, before and after.
        return residual
    parts = [
        jnp.where(_within(run, worker, workers)[:, None], lax.slice_in_dim(residual, *_span(run, workers)), 0.0)
        for run in chosen
    ]
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def put(residual: Array, new: Array, chosen: Sequence[Run], rows: int, worker: Array, workers: int) -> Array:
    """Returns the residual with new values of what :func:`take` gave."""
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
