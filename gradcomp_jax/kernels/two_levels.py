"""Two bits a value: its sign, and one of two magnitudes of its row."""

import jax.numpy as jnp

from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.packing import pack_bits, unpack_bits


def to_two_levels(values: Array) -> tuple[Array, Array]:
    """Rounds each value to one of its row's two magnitudes: the means of those up to and above the row's mean magnitude.

    Where a row has zeros the lower magnitude is zero, so that zeros stay zeros.

    Args:
        values: float32 ``[rows, k]``.

    Returns:
        ``(words, levels)``: uint8 ``[rows, ceil(k / 4)]``, four values to a byte; bfloat16 ``[rows, 2]``, not finite where
        a value of the row is not.
    """
    size = jnp.abs(values)
    above = size > jnp.mean(size, axis=1, keepdims=True)
    count = jnp.sum(above, axis=1).astype(jnp.float32)
    upper = jnp.sum(jnp.where(above, size, 0.0), axis=1) / jnp.maximum(count, 1.0)
    lower = jnp.sum(jnp.where(above, 0.0, size), axis=1) / jnp.maximum(size.shape[1] - count, 1.0)
    lower = jnp.where((size == 0).any(axis=1), 0.0, lower)
    codes = jnp.signbit(values).astype(jnp.uint8) * 2 + above.astype(jnp.uint8)
    return pack_bits(codes, 2), jnp.stack([lower, upper], axis=1).astype(jnp.bfloat16)


def from_two_levels(words: Array, levels: Array, k: int) -> Array:
    """Inverts :func:`to_two_levels` up to rounding: float32 ``[..., rows, k]``."""
    codes = unpack_bits(words, k, 2)
    levels = levels.astype(jnp.float32)
    size = jnp.where((codes & 1) != 0, levels[..., 1:], levels[..., :1])
    return jnp.where((codes & 2) != 0, -size, size)
