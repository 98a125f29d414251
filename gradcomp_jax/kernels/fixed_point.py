"""Fixed-point numbers: integers times a power of two that is the same for all."""

import jax.numpy as jnp

from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.random import Generator, rounded, uniform

_DTYPES = {8: jnp.int8, 16: jnp.int16}
_MOST_FRACTION_BITS = 126  # the smallest normal float32 is 2**-126


def to_fixed(rows: Array, key: Array | None, *, bits: int, fraction_bits: int, generator: Generator = "hash") -> Array:
    r"""Rounds to multiples of :math:`2^{-F}`, up with the probability that makes the expectation the value.

    A value on the grid is never moved. What lies beyond :math:`[-2^{bits-1}, 2^{bits-1} - 1]\,2^{-F}` saturates.

    Args:
        rows: float32 ``[rows, block]``. A NaN or an infinity becomes some integer: a caller that must know tests the input.
        key: rounds stochastically with this key; to the nearest, ties to even, with ``None``.
        bits: 8 or 16.
        fraction_bits: F, from 0 to 126.
        generator: ``hash`` or ``threefry``.

    Returns:
        int8 or int16 ``[rows, block]``.

    Raises:
        ValueError: for an unknown width, or fraction bits outside their range.

    References:
        Gupta et al., 2015, https://arxiv.org/abs/1502.02551, section 3.2.
    """
    if bits not in _DTYPES:
        raise ValueError(f"bits must be 8 or 16, got {bits}")
    # A power of two multiplies exactly; a product that overflows is beyond the range anyway.
    scaled = rows * jnp.float32(2.0 ** _fraction(fraction_bits))
    drawn = None if key is None else uniform(key, rows.shape, generator)
    top = 2 ** (bits - 1)
    return jnp.clip(rounded(scaled, drawn), -top, top - 1).astype(_DTYPES[bits])


def from_fixed(words: Array, fraction_bits: int) -> Array:
    """Inverts :func:`to_fixed` up to rounding: integers of any width, also of a sum, to float32 of the same shape.

    It is exact for integers below 2**24.
    """
    return words.astype(jnp.float32) * jnp.float32(2.0 ** -_fraction(fraction_bits))


def _fraction(bits: int) -> int:
    if not 0 <= bits <= _MOST_FRACTION_BITS:
        raise ValueError(f"fraction_bits must be between 0 and {_MOST_FRACTION_BITS}, got {bits}")
    return bits
