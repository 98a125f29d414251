"""Floating point of eight bits, as bytes.

Micikevicius et al., 2022, FP8 Formats for Deep Learning, https://arxiv.org/abs/2209.05433, section 3.
"""

from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from gradcomp_jax import _checks
from gradcomp_jax._typing import Array

Float8 = Literal["e4m3", "e5m2"]

_DTYPES: dict[str, Any] = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def to_float8(rows: Array, dtype: Float8, *, largest: Array | None = None) -> tuple[Array, Array | None]:
    """Casts to the nearest number of the format, ties to even; a number beyond its largest becomes the largest.

    Args:
        rows: float32 ``[rows, block]``. A NaN stays a NaN; an infinity saturates, and shows only in ``scale``.
        dtype: ``e4m3`` (3 bits of mantissa, up to 448, in steps of 2**-9 or more) or ``e5m2`` (2 bits, up to 57344,
            steps of 2**-16).
        largest: float32 ``[rows]``, the rows' largest magnitudes: each row is scaled so that its largest becomes the
            format's. Without it casts are plain.

    Returns:
        ``(words, scale)``: uint8 ``[rows, block]``; float32 ``[rows, 1]``, or ``None`` without ``largest``. A row of
        zeros, or one too small for its scale to be a normal float32, has scale 0 and decodes to zeros.

    Raises:
        ValueError: for another format.
    """
    _checks.one_of("dtype", dtype, _DTYPES)
    top = _LARGEST[dtype]
    if largest is None:
        return _words(rows, dtype), None
    scale = largest[:, None] * jnp.float32(1 / top)
    # A NaN is not below the smallest normal number: it stays in the scale, where it is detected.
    usable = ~(scale < jnp.finfo(jnp.float32).tiny)
    scaled = jnp.where(usable, rows / jnp.where(usable, scale, 1.0), 0.0)
    return _words(scaled, dtype), jnp.where(usable, scale, 0.0)


def _words(x: Array, dtype: Float8) -> Array:
    top = _LARGEST[dtype]
    # A NaN fails comparisons; a minimum of floats may lose it.
    x = jnp.where(x > top, top, jnp.where(x < -top, -top, x))
    return lax.bitcast_convert_type(x.astype(_DTYPES[dtype]), jnp.uint8)


def from_float8(words: Array, dtype: Float8, scale: Array | None = None) -> Array:
    """Inverts :func:`to_float8` up to rounding: uint8 ``[rows, block]`` to float32, times ``scale`` (``[rows, 1]``)."""
    _checks.one_of("dtype", dtype, _DTYPES)
    x = lax.bitcast_convert_type(words, _DTYPES[dtype]).astype(jnp.float32)
    return x if scale is None else x * scale
