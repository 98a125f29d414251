"""Row-wise reductions in the shapes that compilers vectorise.

XLA's CPU backend needs runs of neighbours or lanes; TPU and GPU want the plain reduction. ``lax.platform_dependent`` keeps both
in one function.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.casting import from_words, to_words

# XLA's CPU backend of jax 0.10 converts a whole bfloat16 array to float32 before it cuts rows from it.
_SLICES_WIDEN = jax.__version_info__ < (0, 11)
_LANES = 64
_MAGNITUDE = 0x7FFFFFFF  # a float32 without its sign


_RUN = 32
"""Neighbours in one run of a reduction: the longest run that XLA's CPU backend unrolls and vectorises completely."""


def max_of_rows(keys: Array) -> Array:
    """Returns the largest integer of each row: ``[rows, block]`` to ``[rows]``."""
    return lax.platform_dependent(keys, cpu=_max_in_stages, default=lambda k: jnp.max(k, axis=1))


def _max_in_stages(keys: Array) -> Array:
    """Reduces runs of neighbours first: on CPU a reduction over a long innermost dimension is a chain of dependent steps.

    The barrier keeps the compiler from merging the stages again.
    """
    n, block = keys.shape
    while block % _RUN == 0:
        block //= _RUN
        keys = lax.optimization_barrier(jnp.max(keys.reshape(n, block, _RUN), axis=2))
    while block % 2 == 0:
        # The few that are left are reduced by halves, which fuses into one expression.
        block //= 2
        keys = jnp.maximum(keys[:, :block], keys[:, block:])
    return keys[:, 0] if block == 1 else jnp.max(keys, axis=1)


def max_of_lanes(keys: Array, lanes: int) -> Array:
    """Returns the largest integer of each of ``lanes`` interleaved lanes: ``[rows, block]`` to ``[rows, lanes]``.

    Lane j is the entries j, j + lanes, and so on; ``lanes`` divides the block.
    """
    n, block = keys.shape
    return lax.optimization_barrier(jnp.max(keys.reshape(n, block // lanes, lanes), axis=1))


LARGEST = float(jnp.finfo(jnp.float32).max)
"""The largest finite float32."""


def all_finite(x: Array, largest: float = LARGEST) -> Array:
    """Returns whether no entry is a NaN, an infinity or above ``largest``: any floating dtype, any shape to a boolean scalar.

    It compares, because a NaN fails every comparison; a maximum of floats may lose it (XLA's CPU backend does by default).
    """
    return jnp.all(jnp.abs(x.astype(jnp.float32)) <= largest)


def largest(rows: Array) -> Array:
    """Returns the largest magnitude of float32 ``[rows, block]``, float32 scalar; not finite where an entry is not."""
    if rows.shape[0] == 0:
        return jnp.zeros((), jnp.float32)
    bits = lax.bitcast_convert_type(largest_of_rows(rows), jnp.int32)
    return lax.bitcast_convert_type(jnp.max(bits), jnp.float32)


def largest_of_rows(rows: Array) -> Array:
    """Returns the largest magnitude of each row: float32 ``[rows, block]`` to ``[rows]``; NaN where a row has one.

    Magnitudes are ordered as their bit patterns are. A maximum of integers needs no handling of NaNs, which makes a maximum
    of floats several times slower.
    """
    if rows.shape[0] == 0:
        return jnp.zeros((0,), jnp.float32)
    bits = lax.bitcast_convert_type(rows, jnp.int32) & jnp.int32(_MAGNITUDE)

    def by_lanes(bits: Array) -> Array:
        # Without arithmetic before it, a maximum by lanes is faster than one by runs.
        lanes = rows.shape[1] % _LANES == 0 and rows.shape[1] > _LANES
        return _max_in_stages(max_of_lanes(bits, _LANES) if lanes else bits)

    top = lax.platform_dependent(bits, cpu=by_lanes, default=lambda b: jnp.max(b, axis=1))
    return lax.bitcast_convert_type(top, jnp.float32)


def norm_of_rows(rows: Array) -> Array:
    """Returns the L2 norm of each row: float32 ``[rows, block]`` to ``[rows]``, not finite where an entry is not.

    Entries are divided by the largest before they are squared, so no square over- or underflows. A row whose largest entry is
    subnormal, which some backends flush to zero, gives that entry. So does a row whose largest entry is 2**126 or more, whose
    reciprocal is subnormal.
    """
    top = largest_of_rows(rows)
    # A NaN is not below the smallest normal number: it divides, and is detected.
    usable = ~(top < jnp.finfo(jnp.float32).tiny) & ~(top >= 2.0**126)
    parts = rows / jnp.where(usable, top, 1.0)[:, None]
    return jnp.where(usable, top * jnp.sqrt(jnp.sum(parts * parts, axis=1)), top)


def sum_of_rows(rows: Array) -> Array:
    """Returns the sum of each row: float32 ``[rows, block]`` to ``[rows]``, in an order that follows from the block."""

    def by_lanes(x: Array) -> Array:
        # Sums of floats may not be reordered: along the row each waits for the one before it, by lanes none does.
        n, block = x.shape
        if block % _LANES or block <= _LANES:
            return jnp.sum(x, axis=1)
        return jnp.sum(lax.optimization_barrier(jnp.sum(x.reshape(n, block // _LANES, _LANES), axis=1)), axis=1)

    return lax.platform_dependent(rows, cpu=by_lanes, default=lambda x: jnp.sum(x, axis=1))


def sums_of_rows(*values: Array) -> Array:
    """Returns the sums of each array's rows: several float32 ``[rows, block]`` to ``[rows, number of arrays]``."""

    def in_turn(*values: Array) -> Array:
        return jnp.stack([sum_of_rows(x) for x in values], axis=1)

    def at_once(*values: Array) -> Array:
        # XLA:GPU fuses the arrays' sources into one reduction and reads them once; XLA:TPU would copy the stack.
        return jnp.sum(jnp.stack(values, axis=1), axis=2)

    return lax.platform_dependent(*values, cpu=in_turn, tpu=in_turn, default=at_once)


def sum_of_workers(values: Array) -> Array:
    """Returns the sum over the first dimension: floats ``[workers, ...]`` to float32 ``[...]``."""

    def in_turn(x: Array) -> Array:
        # The library that XLA's CPU backend uses is many times slower for a sum over few long rows.
        rows = to_words(x) if _SLICES_WIDEN and x.dtype.itemsize < 4 else x
        return functools.reduce(jnp.add, [from_words(rows[i], x.dtype).astype(jnp.float32) for i in range(len(x))])

    return lax.platform_dependent(values, cpu=in_turn, default=lambda x: jnp.sum(x.astype(jnp.float32), axis=0))
