"""A tensor seen as float32 rows of a fixed length, and back."""

import math

import jax
import jax.numpy as jnp

from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.casting import narrowed
from gradcomp_jax.kernels.platforms import held_on_tpu

_LARGE = 2**20
"""Entries from which an array's temporaries matter."""


def row_count(size: int, block: int) -> int:
    """Returns the number of rows of ``block`` entries that hold ``size`` entries."""
    return -(-size // block)


def as_rows(x: Array, block: int) -> Array:
    """Flattens ``x`` of any shape and real dtype into float32 ``[ceil(size / block), block]``, zeros at the end."""
    flat = x.reshape(-1).astype(jnp.float32)
    rows = row_count(flat.size, block)
    if flat.size != rows * block:
        flat = jnp.pad(flat, (0, rows * block - flat.size))
    return flat.reshape(rows, block)


def from_rows(rows: Array, shape: tuple[int, ...], dtype: jnp.dtype, *, held: bool = False) -> Array:
    """Inverts :func:`as_rows`: drops the padding and restores shape and dtype, as :func:`narrowed` casts.

    With ``held``, TPU first holds in memory the rows that become a large array of another width. The change of tiles is a copy
    there, and the rows would be computed again for each piece of it.
    """
    size = math.prod(shape)
    if held and size >= _LARGE and len(shape) > 1 and shape[-1] != rows.shape[-1]:
        rows = held_on_tpu(rows)
    flat = rows.reshape(-1)
    if flat.size != size:
        flat = jax.lax.slice(flat, (0,), (size,))
    return narrowed(flat.reshape(shape), dtype)


def valid_counts(size: int, block: int) -> Array:
    """Returns how many entries of each row are not padding: int32 ``[rows]``; ``size`` may exceed an int32."""
    rows = row_count(size, block)
    whole = jnp.full((rows,), block, jnp.int32)
    # The last row is found by its number: its first entry's position may exceed an int32.
    is_last = jax.lax.iota(jnp.int32, rows) == rows - 1
    return jnp.where(is_last, size - (rows - 1) * block, whole) if block > 1 else whole


def valid_mask(count: Array, block: int) -> Array:
    """Returns boolean ``[rows, block]``, true where an entry is not padding."""
    return jax.lax.broadcasted_iota(jnp.int32, (count.shape[0], block), 1) < count[:, None]


def spread(scale: Array, shape: tuple[int, ...]) -> Array:
    """Returns the scale of each entry, that of its stretch: ``[rows, parts]`` to ``[rows, block]``."""
    n, block = shape
    parts = scale.shape[-1]
    return jnp.broadcast_to(scale[:, :, None], (n, parts, block // parts)).reshape(n, block)
