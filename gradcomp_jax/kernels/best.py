"""The largest few of each row by one reduction, for GPU, where every reduction is a kernel that reads its operand again."""

import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array

_LEAST = jnp.iinfo(jnp.int32).min


def best_at_once(keys: Array, k: int) -> list[Array]:
    """Returns the ``k`` largest of each row, largest first: ``k`` arrays int32 ``[rows]``.

    Where a row has fewer, the rest are the smallest int32. What is reduced are sorted lists, of one key each at first. An entry
    costs some ``k log2 k`` comparisons, so it is for few.

    Args:
        keys: int32 ``[rows, block]``. Columns would not do: XLA:GPU keeps 8 KiB of shared memory for each list of them.
        k: at least 1.
    """
    length = 1 << (k - 1).bit_length()
    # Of the keys, so that they vary over the axes of a mesh as the keys do; compilers see a constant.
    nothing = keys * 0 + jnp.int32(_LEAST)
    lists = (keys, *(nothing for _ in range(length - 1)))
    start = tuple(jnp.int32(_LEAST) for _ in lists)
    return list(lax.reduce(lists, start, _merged, (1,))[:k])


def _merged(ours: tuple[Array, ...], theirs: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns the larger half of two lists in falling order, in falling order."""
    # What is taken from each end rises and falls once, which half-cleaners sort (Batcher, 1968).
    merged = [jnp.maximum(a, b) for a, b in zip(ours, reversed(theirs), strict=True)]
    half = len(merged) // 2
    while half:
        for i in range(len(merged)):
            if not i & half:
                pair = merged[i], merged[i | half]
                merged[i], merged[i | half] = jnp.maximum(*pair), jnp.minimum(*pair)
        half //= 2
    return tuple(merged)
