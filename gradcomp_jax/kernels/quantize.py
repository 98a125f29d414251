"""Block-scaled int8: one float32 scale for each row, values rounded to -127..127."""

import jax.numpy as jnp

from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.random import Generator, uniform
from gradcomp_jax.kernels.reductions import largest_of_rows

LEVELS = 127


def quantize_int8(
    rows: Array, key: Array | None = None, *, largest: Array | None = None, generator: Generator = "hash"
) -> tuple[Array, Array]:
    """Quantizes each row against its own largest magnitude.

    Args:
        rows: float32 ``[rows, block]``. Padding of zeros does not move the scale.
        key: rounds stochastically (unbiased) with this key; to the nearest value without.
        largest: float32 ``[rows]``, the rows' largest magnitudes, where they are known.
        generator: ``hash`` or ``threefry``.

    Returns:
        ``(values, scale)``: int8 ``[rows, block]`` and float32 ``[rows, 1]``; a row of zeros has scale 0.
    """
    if rows.shape[0] == 0:
        return jnp.zeros(rows.shape, jnp.int8), jnp.zeros((0, 1), jnp.float32)
    largest = largest_of_rows(rows) if largest is None else largest
    scale = largest[:, None] * jnp.float32(1 / LEVELS)
    # Below the smallest normal float the quotient overflows or is flushed: such a row decodes to zeros and
    # whoever keeps a residual keeps all of it.
    # A NaN is not below it and stays in the scale, where it is seen.
    usable = ~(scale < jnp.finfo(jnp.float32).tiny)
    scaled = jnp.where(usable, rows / jnp.where(usable, scale, 1.0), 0.0)
    if key is None:
        rounded = jnp.round(scaled)
    else:
        # A comparison, not floor(scaled + u): that sum rounds, and would at times move a value that is on the grid.
        low = jnp.floor(scaled)
        rounded = low + (uniform(key, rows.shape, generator) < scaled - low).astype(jnp.float32)
    return jnp.clip(rounded, -LEVELS, LEVELS).astype(jnp.int8), jnp.where(usable, scale, 0.0)


def dequantize_int8(values: Array, scale: Array) -> Array:
    """Inverse of :func:`quantize_int8` up to rounding: float32 ``[rows, block]``."""
    return values.astype(jnp.float32) * scale
