"""The steps of a power iteration: products with few columns, and orthonormal columns between them."""

import functools

import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.platforms import on_cpu
from gradcomp_jax.kernels.reductions import largest_of_rows

UNROLLED = 16
"""Accelerators multiply up to so many columns one by one."""

_IN_A_ROW = 8
"""Up to so many columns, an orthogonalization has code for each column instead of a loop."""

_DEPENDENT = 1e-5
"""If less than this part of a column is new, its direction is that of a rounding error, not of the gradient."""


def orthogonalize(p: Array) -> Array:
    """Returns orthonormal columns that span what the columns of each matrix span.

    It runs modified Gram-Schmidt, column by column, twice. One pass leaves nearly dependent columns orthogonal to only a few
    digits, the second makes them orthogonal to rounding. A column becomes zero if it is zero, or if less than 1e-5 of it is
    outside the span of those before it. So of ``r > n`` columns at least ``r - n`` become zero.

    Args:
        p: float32 ``[batch, n, r]``, of any magnitudes.

    Returns:
        float32 ``[batch, n, r]``. A column that is not finite gives NaN, there and in the columns after it.

    References:
        Vogels et al., 2019, PowerSGD, https://arxiv.org/abs/1905.13727, algorithm 1; Giraud et al., 2005, "The loss of
        orthogonality in the Gram-Schmidt orthogonalization process", on why two passes are enough.
    """
    if p.size == 0:
        return p
    # Columns are rows of memory, in units of their largest entry, so that no square over- or underflows.
    columns = jnp.swapaxes(p, 1, 2)
    batch, r, n = columns.shape
    top = largest_of_rows(columns.reshape(batch * r, n)).reshape(batch, r, 1)
    usable = ~(top < jnp.finfo(jnp.float32).tiny)
    columns = jnp.where(usable, columns / jnp.where(usable, top, 1.0), 0.0)
    return jnp.swapaxes(_gram_schmidt(_gram_schmidt(columns)), 1, 2)


def times(m: Array, q: Array) -> Array:
    """Returns :math:`M Q` of each pair, float32 ``[batch, n, m]`` and ``[batch, m, r]``: float32 ``[batch, n, r]``.

    On accelerators the sums for a few columns are one pass that reads the sources of the matrix; a matrix product needs the
    matrix written first.
    """

    def product(m: Array, q: Array) -> Array:
        # Full precision: matrix units would multiply in bfloat16 by default, and the residual would see it.
        return jnp.einsum("bij,bjr->bir", m, q, precision=lax.Precision.HIGHEST)

    def summed(m: Array, q: Array) -> Array:
        return jnp.stack([jnp.sum(m * q[:, None, :, k], axis=2) for k in range(q.shape[2])], axis=2)

    return on_cpu(product, summed if q.shape[2] <= UNROLLED else product, m, q)


def outer(p: Array, q: Array) -> Array:
    """Returns :math:`P Q^T` of each pair, ``[batch, n, r]`` and ``[batch, m, r]``: float32 ``[batch, n, m]``.

    Accelerators add up an outer product for each column in the pass that uses the result; a matrix product would be written
    and read again.
    """

    def product(p: Array, q: Array) -> Array:
        return jnp.einsum("bir,bjr->bij", p, q, precision=lax.Precision.HIGHEST)

    def added(p: Array, q: Array) -> Array:
        return functools.reduce(jnp.add, (p[:, :, None, k] * q[:, None, :, k] for k in range(p.shape[2])))

    return on_cpu(product, added if p.shape[2] <= UNROLLED else product, p, q)


def unit_columns(q: Array) -> Array:
    """Returns each column at length 1, float32 ``[batch, m, r]``; zeros stay zeros, a column that is not finite gives NaN."""
    top = jnp.max(jnp.abs(q), axis=1, keepdims=True)
    usable = ~(top < jnp.finfo(jnp.float32).tiny)
    # In units of the largest entry no square over- or underflows.
    scaled = jnp.where(usable, q / jnp.where(usable, top, 1.0), 0.0)
    return scaled / jnp.where(usable, jnp.sqrt(jnp.sum(scaled * scaled, axis=1, keepdims=True)), 1.0)


def _gram_schmidt(rest: Array) -> Array:
    """Runs one pass over ``[batch, r, n]``: each column is removed from all later ones as soon as it is known."""
    length = jnp.sqrt(jnp.sum(rest * rest, axis=2))
    if rest.shape[1] > _IN_A_ROW:
        return lax.fori_loop(0, rest.shape[1], lambda j, rest: _take_out(j, rest, length), rest)
    done = []
    for j in range(rest.shape[1]):
        column = _normalized(rest[:, 0], length[:, j])
        done.append(column)
        rest = _without(rest[:, 1:], column)
    return jnp.stack(done, axis=1)


def _take_out(j: Array, rest: Array, length: Array) -> Array:
    """Normalizes one column and removes it from the later ones: the body of a loop, so the program does not grow with r."""
    column = _normalized(lax.dynamic_index_in_dim(rest, j, 1, keepdims=False), jnp.take(length, j, axis=1))
    follows = lax.iota(jnp.int32, rest.shape[1]) > j
    rest = jnp.where(follows[None, :, None], _without(rest, column), rest)
    return lax.dynamic_update_index_in_dim(rest, column, j, 1)


def _normalized(column: Array, length: Array) -> Array:
    """Returns the rest of each column ``[batch, n]``, at length 1; zeros if little of its original ``length`` is left."""
    left = jnp.sqrt(jnp.sum(column * column, axis=1))
    # A NaN is not below the bound: it stays, and is detected.
    keep = ~(left <= _DEPENDENT * length)[:, None]
    return jnp.where(keep, column / jnp.where(keep, left[:, None], 1.0), 0.0)


def _without(rest: Array, column: Array) -> Array:
    """Returns the columns ``[batch, r, n]`` without their parts along a column of length 1."""
    along = jnp.einsum("bn,brn->br", column, rest, precision=lax.Precision.HIGHEST)
    return rest - along[:, :, None] * column[:, None]
