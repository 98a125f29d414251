"""Entries of which several may have the same place: the choices of many workers, placed in one scatter."""

import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array


def place_repeated(index: Array, value: Array, block: int) -> Array:
    """Returns dense rows that hold, at each index, the sum of all its values.

    Entries of one place are found by comparing all entries and added up. The first of them gets the sum, and a single scatter
    writes each place once. So the order of the sum is fixed; a scatter that adds has no fixed order on GPU.

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
    # An entry that is not the first of its place goes beyond the row, to a separate place.
    place = jnp.where((same & earlier).any(2), block + lax.broadcasted_iota(jnp.int32, (n, k), 1), index)
    row = lax.broadcasted_iota(jnp.int32, (n, k), 0)
    return jnp.zeros((n, block), jnp.float32).at[row, place].set(total, unique_indices=True, mode="drop")
