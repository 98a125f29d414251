"""Casts numbers to dtypes wide enough for sums, and to unsigned words, which a collective moves unchanged.

Some backends widen bfloat16 or int8 inside a collective, which doubles the bytes; unsigned words cross unchanged.
"""

import functools

import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def widened(x: Array) -> Array:
    """Returns floats of fewer than 32 bits as float32, and all other arrays unchanged."""
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if narrow else x


def range_of(dtype: jnp.dtype) -> float | None:
    """Returns the largest number of a floating dtype whose range is narrower than float32's, ``None`` for every other dtype.

    It is ``None`` for bfloat16 too: what an exchange accepts is far below the largest number of either.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    most = float(jnp.finfo(dtype).max)
    return most if most < 2.0**127 else None


def narrowed(x: Array, dtype: jnp.dtype) -> Array:
    """Casts to ``dtype``. A number beyond a narrower range becomes the largest of that range; a NaN stays a NaN."""
    most = range_of(dtype)
    return (x if most is None else jnp.clip(x, -most, most)).astype(dtype)


def to_words(x: Array) -> Array:
    """Reinterprets numbers of 8 to 64 bits as unsigned integers of that width."""
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return x
    return lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])


def from_words(words: Array, dtype: jnp.dtype) -> Array:
    """Reads arrays back from words: the inverse of :func:`to_words`."""
    return words if words.dtype == dtype else lax.bitcast_convert_type(words, dtype)


def split_words(words: Array, itemsize: int) -> Array:
    """Splits words ``[..., n]`` into ``[..., k * n]`` narrower ones of ``itemsize`` bytes: the low parts of all, then the next.

    It goes plane after plane, because TPU pads a last dimension of k to a whole row of lanes.
    """
    if words.dtype.itemsize == itemsize:
        return words
    narrow, parts = _UNSIGNED[itemsize], words.dtype.itemsize // itemsize
    planes = [(words >> jnp.asarray(8 * itemsize * i, words.dtype)).astype(narrow) for i in range(parts)]
    return jnp.concatenate(planes, axis=-1)


def join_words(planes: Array, dtype: jnp.dtype) -> Array:
    """Inverts :func:`split_words`, to words of ``dtype``."""
    if planes.dtype == dtype:
        return planes
    parts = jnp.dtype(dtype).itemsize // planes.dtype.itemsize
    bits = 8 * planes.dtype.itemsize
    each = [p.astype(dtype) << jnp.asarray(bits * i, dtype) for i, p in enumerate(jnp.split(planes, parts, axis=-1))]
    return functools.reduce(jnp.bitwise_or, each)
