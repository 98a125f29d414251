"""Chooses entries at random, from seeds that every worker knows; and finds all entries that are not zero."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.random import seeded_bits
from gradcomp_jax.kernels.selection import take_from_rows


def random_of_rows(seeds: Array, block: int, k: int) -> Array:
    """Draws ``k`` distinct positions of each row: one in each of k bins, after a random rotation of the row.

    Bin j is from ``floor(j * block / k)`` to ``floor((j + 1) * block / k)``. The rotation gives every entry the same
    probability ``k / block``, also where the bins differ in size. (A draw is a remainder of 32 bits, so probabilities are
    equal up to ``block / 2**32``.)

    Args:
        seeds: uint32 ``[rows]``; equal seeds give equal positions.
        block: entries of a row, at most 2**30.
        k: from 0 to ``block``.

    Returns:
        int32 ``[rows, k]``, distinct within a row, in no particular order.

    Raises:
        ValueError: for more positions than there are entries.
    """
    if not 0 <= k <= block:
        raise ValueError(f"k must be between 0 and the block of {block}, got {k}")
    shape = (seeds.shape[0], k)
    if k == 0:
        return jnp.zeros(shape, jnp.int32)
    edge = np.arange(k + 1, dtype=np.int64) * block // k
    start, size = edge[:-1].astype(np.uint32), np.diff(edge).astype(np.uint32)
    bits = seeded_bits(seeds, k + 1)
    # One column more than bins: the rotation must not depend on what a bin drew.
    turn = lax.rem(bits[:, k:], jnp.uint32(block))
    inside = lax.rem(bits[:, :k], jnp.broadcast_to(size, shape))
    place = start[None] + inside + turn
    return jnp.where(place >= block, place - jnp.uint32(block), place).astype(jnp.int32)


def nonzero_of_rows(rows: Array, k: int) -> tuple[Array, Array]:
    """Returns all entries that are not zero, exactly and by position, of rows that have at most ``k`` of them.

    Args:
        rows: float32 ``[rows, block]``, the block at most 2**23. A NaN is not zero.
        k: at most ``block``. For a row with more entries that are not zero, the first ``k`` are returned.

    Returns:
        ``(index, value)``: int32 and float32 ``[rows, k]``. Unused places come last, with value 0 and the positions of the
        row's first zeros: all k positions of a row are distinct, as ``place_in_rows`` requires.

    Raises:
        ValueError: for more positions than there are entries.
    """
    block = rows.shape[1]
    if not 0 <= k <= block:
        raise ValueError(f"k must be between 0 and the block of {block}, got {k}")
    position = lax.broadcasted_iota(jnp.int32, rows.shape, 1)
    # Keys fall with the position, and keys of zeros are below all others. They are float32, where they are exact: for
    # integers backends sort the whole row, which is several times slower.
    key = jnp.where(rows != 0, 2 * block - position, block - position).astype(jnp.float32)
    best = lax.top_k(key, k)[0].astype(jnp.int32)
    index = jnp.where(best > block, 2 * block - best, block - best)
    return index, take_from_rows(rows, index)
