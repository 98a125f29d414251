"""Entries of which several may have the same place: what many workers chose, placed in one go."""

import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array


def place_repeated(index: Array, value: Array, block: int) -> Array:
    """Returns dense rows with the sum of all values of each index at it.

    Entries of one place are added up by comparing them all; the first of them carries the sum, and a single scatter, each
    of whose places is written once, places it. So the order of the sum is fixed, where a scatter that adds has none on GPU.

    Args:
        index: integer ``[rows, k]``.
        value: float32 ``[rows, k]``.
        block: length of a row.

    Returns:
        float32 ``[rows, block]``.
    """
    n, k = index.shape
    index = index.astype(jnp.int32)
    same = index[:, :, None] == index[:, None, :]
    total = jnp.sum(jnp.where(same, value[:, None, :], 0.0), axis=2)
    earlier = lax.broadcasted_iota(jnp.int32, (1, k, k), 2) < lax.broadcasted_iota(jnp.int32, (1, k, k), 1)
    # What is not the first of its place goes beyond the row, to a place of its own.
    place = jnp.where((same & earlier).any(2), block + lax.broadcasted_iota(jnp.int32, (n, k), 1), index)
    row = lax.broadcasted_iota(jnp.int32, (n, k), 0)
    return jnp.zeros((n, block), jnp.float32).at[row, place].set(total, unique_indices=True, mode="drop")
