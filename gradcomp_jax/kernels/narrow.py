"""Rows of floats in two bytes or one byte each, rounded without bias: a state between two steps.

int8 and float8_e4m3fn have a float32 scale for each stretch of a row; bfloat16 has float32's range and needs none.
"""

import math

import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.casting import from_words, to_words
from gradcomp_jax.kernels.random import hash_bits, rounded, uniform
from gradcomp_jax.kernels.reductions import LARGEST, largest_of_rows
from gradcomp_jax.kernels.rows import spread

NARROW = ("bfloat16", "int8", "float8_e4m3fn")
"""Dtypes that :func:`to_narrow` takes."""

_TOP = {"int8": 127.0, "float8_e4m3fn": 448.0}
_SHORTEST, _LONGEST = 128, 1024  # of the stretches of a row that is divided
_LEAST = 16  # entries of a block: with fewer, a scale takes more than the narrow values save
_SMALLEST = (127 - 6) << 23  # float32's 2**-6, e4m3's smallest normal number


def narrow_dtype(dtype: str, block: int) -> str:
    """Returns the dtype that blocks of ``block`` entries are stored in: bfloat16 where they are too short for a scale."""
    return "bfloat16" if dtype in _TOP and block < _LEAST else dtype


def is_scaled(dtype: str) -> bool:
    """Returns whether a dtype needs scales because its range is too small."""
    return dtype in _TOP


def scale_width(block: int) -> int:
    """Returns how many entries of a row share a scale: at most 1,024 where such stretches divide it, else the row."""
    shared = math.gcd(block, _LONGEST)
    return shared if shared >= _SHORTEST else block


def narrow_scale(rows: Array, dtype: str) -> Array | None:
    """Returns the scale of each stretch of a row: float32 ``[rows, block / width]``; ``None`` for bfloat16.

    It is the largest magnitude of a stretch over the dtype's largest number. It is 0 where that is not a normal float32, and
    such a stretch is stored as zeros.
    """
    if dtype not in _TOP:
        return None
    n, block = rows.shape
    width = scale_width(block)
    # Less than the largest, because scale times top must be finite again.
    most = jnp.minimum(largest_of_rows(rows.reshape(-1, width)), LARGEST * (1 - 2**-20))
    scale = most * jnp.float32(1 / _TOP[dtype])
    return jnp.where(scale < jnp.finfo(jnp.float32).tiny, 0.0, scale).reshape(n, block // width)


def to_narrow(rows: Array, dtype: str, scale: Array | None, key: Array) -> Array:
    """Rounds stochastically to one of the two neighbours in a narrow dtype: the expectation over keys is the number.

    Zeros stay zeros. An entry is off by less than one step of its grid, with a standard deviation of at most half a step. A
    step is ``scale`` for int8; for float8_e4m3fn an eighth of the power of two below the entry, and at least ``scale / 512``;
    for bfloat16 2**-7 times that power of two.

    Args:
        rows: finite float32 ``[rows, block]``.
        dtype: one of :data:`NARROW`.
        scale: what :func:`narrow_scale` made of the same rows.
        key: a typed JAX key (scalar).

    Returns:
        ``[rows, block]`` in the dtype.
    """
    if scale is None:
        # Numbers stay within bfloat16's range: the next number above would be an infinity.
        top = float(jnp.finfo(jnp.bfloat16).max)
        bits = lax.bitcast_convert_type(jnp.clip(rows, -top, top), jnp.uint32) + (hash_bits(key, rows.shape) >> 16)
        return lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    divisor = spread(jnp.where(scale > 0, scale, 1.0), rows.shape)
    scaled = jnp.where(spread(scale, rows.shape) > 0, rows / divisor, 0.0)
    if dtype == "int8":
        return jnp.clip(rounded(scaled, uniform(key, rows.shape)), -127, 127).astype(jnp.int8)
    return lax.bitcast_convert_type(_to_e4m3(scaled, hash_bits(key, rows.shape)), jnp.float8_e4m3fn)


def _to_e4m3(x: Array, bits: Array) -> Array:
    """Rounds magnitudes up to 448 by random bits: uint8.

    It computes in integers, because backends without the format need many operations for a cast.
    """
    word = lax.bitcast_convert_type(x, jnp.int32)
    size = word & 0x7FFFFFFF
    drawn = (bits >> 8).astype(jnp.int32)
    # Exponent and three bits are rounded by the bits below them: a carry continues into the next power of two.
    normal = ((size + (drawn >> 4)) >> 20) - (120 << 3)
    # Below 2**-6 numbers are rounded to steps of 2**-9, by the 24 bits below those.
    small = ((jnp.abs(x) * jnp.float32(2**33)).astype(jnp.int32) + drawn) >> 24
    code = jnp.minimum(jnp.where(size < _SMALLEST, small, normal), 0x7E)
    return (code | ((word >> 24) & 0x80)).astype(jnp.uint8)


def _from_e4m3(words: Array) -> Array:
    word = words.astype(jnp.int32)
    code = word & 0x7F
    normal = lax.bitcast_convert_type((code << 20) + (120 << 23), jnp.float32)
    size = jnp.where(code < 8, code.astype(jnp.float32) * jnp.float32(2**-9), normal)
    return jnp.where(word >= 0x80, -size, size)


def from_narrow(values: Array, scale: Array | None = None) -> Array:
    """Returns float32 ``[rows, block]`` of what :func:`to_narrow` returned."""
    wide = _from_e4m3(to_words(values)) if values.dtype == jnp.float8_e4m3fn else values.astype(jnp.float32)
    return wide if scale is None else wide * spread(scale, values.shape)


def chosen(condition: Array, new: Array, old: Array) -> Array:
    """Returns ``jnp.where(condition, new, old)``, for narrow floats on words: the CPU backend would widen and narrow both."""
    if str(jnp.result_type(new)) not in NARROW or jnp.issubdtype(new.dtype, jnp.integer):
        return jnp.where(condition, new, old)
    return from_words(jnp.where(condition, to_words(new), to_words(old)), new.dtype)
