"""Floating point of four bits without a mantissa (E3M0): a sign, and zero or one of seven powers of two.

Exponent 0 is zero and exponent e is 2**(e - 1) here, up to 64. With the usual bias these are 0, 1/4, 1/2, ..., 16; the scale
makes up for the difference.
"""

import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array

_MANTISSA = 23  # bits of a float32's
_BIAS = 127


def to_e3m0(scaled: Array, drawn: Array | None) -> Array:
    """Returns the nearest number's code, the larger of two equally near; with numbers drawn from [0, 1), unbiased.

    Args:
        scaled: float32. A number beyond 64 saturates; a NaN becomes some code: its scale must carry it.
        drawn: float32 of the same shape, or ``None``.

    Returns:
        int32 of the same shape, in [0, 16): the sign, then three bits of exponent.
    """
    magnitude = jnp.abs(scaled)
    # From 2**e at code e the distance to the next number is one whole mantissa, which a carry rounds. Below 1, where the
    # numbers are 0 and 1, it is the mantissa of 1 + x, and from 1 on that of 2 x.
    bits = lax.bitcast_convert_type(jnp.maximum(1 + magnitude, 2 * magnitude), jnp.int32)
    half = 1 << (_MANTISSA - 1)
    carry = jnp.int32(half) if drawn is None else (drawn * jnp.float32(2 * half)).astype(jnp.int32)
    code = jnp.clip(((bits + carry) >> _MANTISSA) - _BIAS, 0, 7)
    return jnp.where(scaled < 0, code + 8, code)


def from_e3m0(digits: Array) -> Array:
    """Inverts :func:`to_e3m0` up to rounding: codes, int32 in [0, 16), to float32 of the same shape."""
    code = digits & 7
    bits = jnp.where(code > 0, (code + (_BIAS - 1)) << _MANTISSA, 0) | ((digits & 8) << 28)
    return lax.bitcast_convert_type(bits, jnp.float32)
