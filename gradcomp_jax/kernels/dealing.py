"""A tensor's entries dealt out over blocks in turn, so that each block is a sample of the whole tensor.

The large rows of an embedding, the large columns of a layer and the large tap of a kernel are then spread over all blocks.
"""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np

from gradcomp_jax._typing import Array

_PAGE = 1024  # entries
_LONG = 8192  # entries of a line; a block's lines of this length and more do not fit a cache together
_APART = 17  # entries: one more than a cache line

_LONGEST_SPREAD = 2**16  # entries of a block: one more block that is longer would be a large part of most tensors

MOST_TRIED = 24
"""How many candidates for the number of rows are compared."""


@dataclasses.dataclass(frozen=True)
class Deal:
    """Says how a vector is dealt: block r has its entries r, r + rows, r + 2 rows, ..., and zeros beyond its end.

    Attributes:
        size: entries of the vector.
        block: entries of a block.
        rows: number of blocks; ``block * rows`` is at least ``size``.
    """

    size: int
    block: int
    rows: int

    def blocks(self, flat: Array) -> Array:
        """Returns the blocks of a vector ``[size]``: ``[rows, block]``."""
        return self.lines(flat).T

    def lines(self, flat: Array) -> Array:
        """Returns a vector as lines of ``rows`` neighbours, one of every block: ``[block, rows]``."""
        return jnp.pad(flat, (0, self.block * self.rows - self.size)).reshape(self.block, self.rows)

    def flat(self, blocks: Array) -> Array:
        """Returns the vector that has these blocks: the inverse of :meth:`blocks`."""
        return blocks.T.reshape(-1)[: self.size]


def dealt_rows(size: int, block: int, periods: tuple[int, ...] = ()) -> int:
    """Returns the number of blocks to deal ``size`` entries to: ``ceil(size / block)`` or a little more.

    With exactly ``ceil(size / block)`` blocks, a block's entries often lie in one column, because the step from one entry to
    the next is a multiple of the tensor's width. So, for blocks up to 65,536 entries, numbers up to one in 256 larger are tried
    too (one larger, if there are fewer than 512 blocks). Each number has a largest gap between the places of a block's entries
    in a period, over all periods; the number with the smallest such gap is taken.

    Args:
        size: entries.
        block: entries of a block.
        periods: lengths after which the tensor's structure repeats: its last dimension, products of trailing ones.
    """
    least = -(-size // block)
    if block > _LONGEST_SPREAD:
        return least
    most = least + max(1, least // 256)
    wanted = tuple(sorted({p for p in periods if 1 < p < size}))
    if least <= 1 or not wanted:
        return least
    return _best_stride(least, most, block, wanted)


@functools.lru_cache(maxsize=4096)
def _best_stride(least: int, most: int, block: int, periods: tuple[int, ...]) -> int:
    tried = np.unique(np.linspace(least, most, min(MOST_TRIED, most - least + 1)).astype(int))
    # An odd number shares no factor of two with a dimension, and most factors of dimensions are two.
    tried = np.unique(np.concatenate([tried, np.minimum(tried | 1, most)]))
    return int(min(tried, key=lambda rows: (_cost(int(rows), block, periods), rows)))


def _cost(rows: int, block: int, periods: tuple[int, ...]) -> float:
    """Returns the largest gap in any period; more where lines are so near to whole pages apart that they share cache places."""
    apart = min(rows % _PAGE, -rows % _PAGE) if rows >= _LONG else _APART
    return round(max(_gap(rows, block, p) for p in periods) + max(0.0, 1 - apart / _APART), 3)


def _gap(rows: int, block: int, period: int) -> float:
    """Returns the largest gap between the places of a block's entries in a period; 1 where they are as even as possible."""
    places = np.sort(np.arange(block, dtype=np.int64) * rows % period)
    gaps = np.diff(places, append=places[0] + period)
    return float(gaps.max()) * min(block, period) / period


def periods_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the products of a shape's trailing dimensions, without the first dimension."""
    return tuple(math.prod(shape[i:]) for i in range(1, len(shape)))
