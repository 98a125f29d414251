"""Floating point of four bits: a sign and three bits of exponent (E3M0), or two of exponent and one of mantissa (E2M1).

E3M0: exponent 0 is zero and exponent e is 2**(e - 1) here, up to 64. With the usual bias these are 0, 1/4, 1/2, ..., 16; the
scale makes up for the difference. E2M1 is ``float4_e2m1fn`` of JAX and ml_dtypes: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their
negatives.
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
    bits = jnp.where(code > 0, (code + (_BIAS - 1)) << _MANTISSA, 0) | _sign_of(digits)
    return lax.bitcast_convert_type(bits, jnp.float32)


def to_e2m1(scaled: Array) -> Array:
    """Returns the nearest number's code, the even one of two equally near.

    Args:
        scaled: float32. A number beyond 6 saturates; a NaN becomes a zero: its scale must carry it.

    Returns:
        int32 of the same shape, in [0, 16): the bits of ``float4_e2m1fn``. A zero keeps its sign.
    """
    magnitude = jnp.abs(scaled)
    # Counts the middles that lie below. A middle itself goes to the even code, so every second one counts when reached.
    below = [magnitude > middle for middle in (0.25, 1.25, 2.5, 5.0)]
    below += [magnitude >= middle for middle in (0.75, 1.75, 3.5)]
    code = sum((one.astype(jnp.int32) for one in below), jnp.int32(0))
    return code | ((lax.bitcast_convert_type(scaled, jnp.int32) >> 28) & 8)


def from_e2m1(digits: Array) -> Array:
    """Inverts :func:`to_e2m1` up to rounding: codes, int32 in [0, 16), to float32 of the same shape."""
    code = digits & 7
    # Exponent and mantissa of a normal number lie in a float32 as they do here, at another place and with another bias.
    normal = (code + ((_BIAS - 1) << 1)) << (_MANTISSA - 1)
    small = lax.bitcast_convert_type(code.astype(jnp.float32) * 0.5, jnp.int32)
    return lax.bitcast_convert_type(jnp.where(code < 2, small, normal) | _sign_of(digits), jnp.float32)


def _sign_of(digits: Array) -> Array:
    return (digits & 8) << 28
