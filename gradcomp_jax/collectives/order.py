"""Keeps collectives in an order that a compiler does not change."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array


def wait(arrays: Sequence[Array], after: Sequence[Array]) -> list[Array]:
    """Returns the same arrays, complete only once others are there.

    This is for collectives that must not be combined: a combined one would wait for the inputs of the last of them. An
    optimization barrier does not keep XLA:TPU from combining, so the first entry of each array is made to depend on the
    others in a way that no compiler simplifies. The rest of an array is made without waiting.

    Args:
        arrays: of any shape, of a dtype of 1, 2 or 4 bytes.
        after: likewise.
    """
    there = are_there(after)
    return list(arrays) if there is None else [_first_if(there, a) if a.size else a for a in arrays]


def are_there(arrays: Sequence[Array]) -> Array | None:
    """Returns True, boolean scalar, which no compiler knows before the arrays are there; ``None`` without an entry."""
    known = [_is_there(a) for a in arrays if a.size]
    return jnp.stack(known).all() if known else None


def _is_there(a: Array) -> Array:
    """Returns true for every number: it has no more ones than bits."""
    first = lax.slice_in_dim(a.reshape(-1), 0, 1)[0]
    word = lax.bitcast_convert_type(first, jnp.dtype(f"uint{8 * a.dtype.itemsize}"))
    return lax.population_count(word) <= 8 * a.dtype.itemsize


def _first_if(there: Array, a: Array) -> Array:
    flat = a.reshape(-1)
    first = jnp.where(there, lax.slice_in_dim(flat, 0, 1), jnp.zeros((), a.dtype))
    return lax.dynamic_update_slice_in_dim(flat, first, 0, axis=0).reshape(a.shape)
