"""How much a worker holds back, against what it sees."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax._typing import Array
from gradcomp_jax.memory import Memory
from gradcomp_jax.per_device import is_per_device

MOST = 2**14
"""Entries of a tensor that are looked at."""


def memory_ratio(
    held: Iterable[tuple[Memory, Sequence[int], Any]], gradient: Sequence[Array], before: Array, ok: Array
) -> Array:
    """Estimates the norm of a worker's memories over that of its gradient: float32 ``[1]``.

    Both norms are from at most ``MOST`` entries of each tensor, evenly spread, so the estimate costs no pass. It stays what
    it was where the exchange was skipped, or the entries that were looked at have no gradient.

    Args:
        held: of each piece: the kind of memory, the numbers of its leaves, and its new state.
        gradient: the leaves.
        before: the last estimate.
        ok: boolean scalar, whether the exchange took place.
    """
    kept, seen = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    for memory, leaves, state in held:
        rows = memory.held(jax.tree.map(lambda p: p.value, state, is_leaf=is_per_device))
        kept += _squares(rows)
        seen += sum((_squares(gradient[i]) for i in leaves), jnp.zeros((), jnp.float32))
    ratio = jnp.sqrt(kept / jnp.where(seen > 0, seen, 1.0))
    return jnp.where(ok & (seen > 0) & jnp.isfinite(ratio), ratio, before)


def _squares(x: Array) -> Array:
    """The sum of an array's squares, from a grid of its entries: slices without a reshape, which could be a copy."""
    if not x.size:
        return jnp.zeros((), jnp.float32)
    # The leading dimension is thinned out first: whole lines are cheap to read.
    wanted, strides = MOST, []
    for n in reversed(x.shape):
        taken = min(n, max(1, wanted))
        strides.append(-(-n // taken))
        wanted //= max(1, -(-n // strides[-1]))
    grid = x[tuple(slice(None, None, s) for s in reversed(strides))].astype(jnp.float32)
    return jnp.sum(grid * grid) * (x.size / math.prod(grid.shape))
