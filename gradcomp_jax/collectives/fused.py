"""Takes many small arrays through one collective: one buffer crosses, not one for each array."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from gradcomp_jax import _compat, kernels
from gradcomp_jax._typing import Array, AxisName
from gradcomp_jax.collectives import tpu

LARGE = 2**16
"""A tensor of at least so many entries crosses by itself, where the compiler makes one operation of all."""


def _fuse(arrays: Sequence[Array], lead: int, cross: Callable[[Array], Array]) -> list[Array]:
    """Joins arrays by dtype after ``lead`` kept dimensions, crosses each buffer and takes the arrays apart again.

    ``cross`` may add leading dimensions but must leave the last one alone.
    """
    results: list[Array | None] = [None] * len(arrays)
    for dtype in dict.fromkeys(a.dtype for a in arrays):
        members = [i for i, a in enumerate(arrays) if a.dtype == dtype]
        flat = [arrays[i].reshape(*arrays[i].shape[:lead], -1) for i in members]
        buffer = flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=-1)
        crossed = cross(buffer)
        start = 0
        for i, piece in zip(members, flat, strict=True):
            part = lax.slice_in_dim(crossed, start, start + piece.shape[-1], axis=crossed.ndim - 1)
            results[i] = part.reshape(*crossed.shape[:-1], *arrays[i].shape[lead:])
            start += piece.shape[-1]
    return [r for r in results if r is not None]


def _as_words(arrays: Sequence[Array], lead: int, cross: Callable[[Sequence[Array]], Sequence[Array]]) -> list[Array]:
    """Takes all arrays across as the narrowest words that any of them has: one buffer, without the latency of a second."""
    if not arrays:
        return []
    words = [kernels.to_words(a) for a in arrays]
    narrowest = min(w.dtype.itemsize for w in words)
    flat = [w.reshape(*w.shape[:lead], -1) for w in words]
    crossed = cross([kernels.split_words(f, narrowest) for f in flat])
    joined = [kernels.join_words(c, w.dtype) for c, w in zip(crossed, words, strict=True)]
    shaped = [j.reshape(*j.shape[:-1], *w.shape[lead:]) for j, w in zip(joined, words, strict=True)]
    return [kernels.from_words(j, a.dtype) for j, a in zip(shaped, arrays, strict=True)]


def all_to_all(arrays: Sequence[Array], axis_name: AxisName | None) -> list[Array]:
    """Sends slice j of every array ``[N, ...]`` to worker j; the result's slice i came from worker i."""
    ways = tpu.all_to_all, tpu.all_to_all_in_lanes
    return list(arrays) if axis_name is None else _across(arrays, 1, axis_name, *ways)


def all_gather(arrays: Sequence[Array], axis_name: AxisName | None) -> list[Array]:
    """Stacks every worker's arrays on a new leading dimension, replicated."""
    ways = tpu.all_gather, tpu.all_gather_in_lanes
    return [a[None] for a in arrays] if axis_name is None else _across(arrays, 0, axis_name, *ways)


def _across(arrays: Sequence[Array], lead: int, axis_name: AxisName, whole: Any, in_lanes: Any) -> list[Array]:
    """Takes all arrays across in one buffer by ``whole``, or on TPU, where it pays, by ``in_lanes``."""
    width = tpu.width(arrays)

    def plain(*flat: Array) -> list[Array]:
        return _fuse(flat, lead, lambda buffer: whole(buffer, axis_name))

    def cross(flat: Sequence[Array]) -> Sequence[Array]:
        if not tpu.pays_in_lanes(flat, lead, width):
            return plain(*flat)
        return lax.platform_dependent(*flat, tpu=lambda *flat: in_lanes(flat, axis_name, width), default=plain)

    return _as_words(arrays, lead, cross)


def psum(arrays: Sequence[Array], axis_name: AxisName | None, shapes: Sequence[tpu.Shapes] = ()) -> list[Array]:
    """Adds every worker's arrays, in their own dtype.

    Accelerators' compilers combine the sums of large tensors, so these need not be copied into one buffer and out of it, nor
    into another layout. ``shapes`` has, for each of the first arrays, the shapes of the tensors that it was joined from.
    """
    if axis_name is None:
        return list(arrays)

    def joined(*arrays: Array) -> list[Array]:
        return _fuse(arrays, 0, lambda buffer: lax.psum(buffer, axis_name))

    def apart(*arrays: Array) -> list[Array]:
        each = [*shapes, *[()] * (len(arrays) - len(shapes))]
        tensors = [tpu.cut(a, of) for a, of in zip(arrays, each, strict=True)]
        every = [t for of in tensors for t in of]
        small = iter(joined(*(p for p in every if p.size < LARGE)))
        sums = iter([next(small) if p.size < LARGE else lax.psum(p, axis_name) for p in every])
        return [tpu.joined([next(sums) for _ in of], a.shape) for a, of in zip(arrays, tensors, strict=True)]

    if all(a.size < LARGE for a in arrays):
        return joined(*arrays)
    return list(kernels.on_cpu(joined, apart, *arrays))


def pmax(arrays: Sequence[Array], axis_name: AxisName | None) -> list[Array]:
    """Returns the elementwise maximum over the workers."""
    if axis_name is None:
        return list(arrays)
    return _fuse(arrays, 0, lambda buffer: lax.pmax(buffer, axis_name))


def permute(arrays: Sequence[Array], to: Sequence[int], axis_name: AxisName) -> list[Array]:
    """Sends every array to worker ``to[index]``, a permutation; returns the arrays of the worker that sends here."""
    pairs = list(enumerate(to))

    def cross(buffer: Array) -> Array:
        return lax.ppermute(_compat.varying(buffer, axis_name), axis_name, pairs)

    return _as_words(arrays, 0, lambda flat: _fuse(flat, 0, cross))


def reduce_scatter(arrays: Sequence[Array], axis_name: AxisName) -> list[Array]:
    """Adds every worker's arrays ``[N, ...]``, of which worker j gets slice j of the sum."""

    def cross(buffer: Array) -> Array:
        return tpu.reduce_scatter(buffer, axis_name)

    # The leading dimension is dropped, because it would have one entry.
    return [a[0] for a in _fuse(arrays, 1, lambda buffer: cross(buffer)[None])]
