"""Row-wise reductions in the shapes that compilers vectorise."""

import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array

_MAGNITUDE = 0x7FFFFFFF  # a float32 without its sign


def max_of_rows(keys: Array) -> Array:
    """The largest integer of each row: ``[rows, block]`` to ``[rows]``, in two stages where the block allows.

    A reduction over the innermost dimension is a chain of dependent steps. The first stage reduces over a middle
    dimension instead, lane by lane; the barrier keeps the compiler from merging the two stages again.
    """
    n, block = keys.shape
    lanes = 64 if block >= 1024 else 32
    if block % lanes == 0 and block > lanes:
        keys = lax.optimization_barrier(jnp.max(keys.reshape(n, block // lanes, lanes), axis=1))
    return jnp.max(keys, axis=1)


def all_finite(x: Array) -> Array:
    """Whether no entry is a NaN or an infinity: any floating dtype and shape to a boolean scalar."""
    return _poison(x.astype(jnp.float32)) == 0


def _poison(x: Array) -> Array:
    """0, or NaN where an entry is not finite: zero times such an entry is NaN, and a sum never loses one.

    A maximum of floats may: some backends drop NaNs from it (XLA's CPU backend does, by default).
    """
    return jnp.sum(x * 0.0)


def largest(x: Array) -> Array:
    """The largest magnitude of a float32 array of any shape, float32 scalar; NaN where an entry is not finite."""
    if x.size == 0:
        return jnp.zeros((), jnp.float32)
    return jnp.max(jnp.abs(x)) + _poison(x)


def largest_of_rows(rows: Array) -> Array:
    """The largest magnitude of each row: float32 ``[rows, block]`` to ``[rows]``; NaN where a row has one.

    Magnitudes order as their bit patterns do, and a maximum of integers needs none of the care for NaNs that makes one
    of floats several times slower.
    """
    if rows.shape[0] == 0:
        return jnp.zeros((0,), jnp.float32)
    bits = lax.bitcast_convert_type(rows, jnp.int32) & jnp.int32(_MAGNITUDE)
    return lax.bitcast_convert_type(max_of_rows(bits), jnp.float32)
