"""Packs increasing numbers in about two bits each plus the logarithm of their mean distance: positions in a long row."""

import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.packing import pack_bits, unpack_bits
from gradcomp_jax.kernels.selection import mark_in_rows

_MOST_COMPARED = 2**14
"""Most comparisons for each row; above that a sort finds the same."""


def elias_fano_bytes(k: int, below: int) -> int:
    """Returns the bytes of ``k`` increasing numbers in ``[0, below)``."""
    low, unary = _bits(k, below)
    return -(-(unary + k * low) // 8)


def to_elias_fano(numbers: Array, below: int) -> Array:
    """Packs numbers that do not decrease: the growth of their high parts in unary, then their low bits.

    With l low bits, number i sets bit ``(number >> l) + i`` of a row of bits, which no other number sets.

    Args:
        numbers: integer ``[..., k]`` in ``[0, below)``, not decreasing along the last dimension.
        below: a bound above all numbers.

    Returns:
        uint8 ``[..., elias_fano_bytes(k, below)]``.

    References:
        Elias, 1974, https://doi.org/10.1145/321812.321820.
    """
    k, numbers = numbers.shape[-1], numbers.astype(jnp.int32)
    low, size = _bits(k, below)
    places = (numbers >> low) + jnp.arange(k)
    unary = mark_in_rows(places.reshape(-1, k), size).reshape(*numbers.shape[:-1], size)
    rest = ((numbers[..., None] >> jnp.arange(low)) & 1).reshape(*numbers.shape[:-1], k * low)
    return pack_bits(jnp.concatenate([unary.astype(jnp.uint8), rest.astype(jnp.uint8)], axis=-1), 1)


def from_elias_fano(packed: Array, k: int, below: int) -> Array:
    """Inverts :func:`to_elias_fano`: uint8 words to int32 ``[..., k]``."""
    low, size = _bits(k, below)
    bits = unpack_bits(packed, size + k * low, 1).astype(jnp.int32)
    unary, rest = bits[..., :size], bits[..., size:].reshape(*bits.shape[:-1], k, low)
    if k * size <= _MOST_COMPARED:
        # The number of bits before that of number i equals the number of bits with at most i ones up to them.
        ones = jnp.cumsum(unary, axis=-1)
        places = jnp.sum(ones[..., None, :] <= jnp.arange(k)[:, None], axis=-1, dtype=jnp.int32)
    else:
        places = lax.sort(jnp.where(unary != 0, jnp.arange(size), size), dimension=-1)[..., :k]
    return ((places - jnp.arange(k)) << low) + jnp.sum(rest << jnp.arange(low), axis=-1, dtype=jnp.int32)


def _bits(k: int, below: int) -> tuple[int, int]:
    """Returns the low bits of each number, the logarithm of the mean distance rounded down; and the number of unary bits.

    There is one unary bit for each number, and one for each step of the high part.
    """
    low = max(0, (below // max(k, 1)).bit_length() - 1)
    return low, k + ((below - 1) >> low)
