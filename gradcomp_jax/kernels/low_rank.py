"""Orthonormal columns, the middle step of a power iteration."""

import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.reductions import largest_of_rows

_DEPENDENT = 1e-5
"""A column of which less than this part is new is a rounding error's direction, not the gradient's."""


def orthogonalize(p: Array) -> Array:
    """Returns orthonormal columns that span what the columns of each matrix span.

    Modified Gram-Schmidt, column by column, twice over: one pass leaves columns that nearly depend on each other
    orthogonal to a few digits only, the second to rounding. A column that is zero, or of which less than 1e-5 is not in
    the span of those before it, becomes zero, so of ``r > n`` columns at least ``r - n`` do.

    Args:
        p: float32 ``[batch, n, r]``, of any magnitudes; r is unrolled.

    Returns:
        float32 ``[batch, n, r]``. A column that is not finite gives NaN, there and in the columns after it.

    References:
        Vogels et al., 2019, PowerSGD, https://arxiv.org/abs/1905.13727, algorithm 1; Giraud et al., 2005, "The loss of
        orthogonality in the Gram-Schmidt orthogonalization process", on why two passes are enough.
    """
    if p.size == 0:
        return p
    # Columns as rows of memory, and in units of their largest entry: no square over- or underflows.
    columns = jnp.swapaxes(p, 1, 2)
    batch, r, n = columns.shape
    top = largest_of_rows(columns.reshape(batch * r, n)).reshape(batch, r, 1)
    usable = ~(top < jnp.finfo(jnp.float32).tiny)
    columns = jnp.where(usable, columns / jnp.where(usable, top, 1.0), 0.0)
    return jnp.swapaxes(_gram_schmidt(_gram_schmidt(columns)), 1, 2)


def _gram_schmidt(rest: Array) -> Array:
    """One pass over ``[batch, r, n]``: each column is taken out of all that follow as soon as it is known."""
    length = jnp.sqrt(jnp.sum(rest * rest, axis=2))
    done = []
    for j in range(rest.shape[1]):
        column = rest[:, 0]
        left = jnp.sqrt(jnp.sum(column * column, axis=1))
        # A NaN is not below the bound either: it stays, and is seen.
        keep = ~(left <= _DEPENDENT * length[:, j])[:, None]
        column = jnp.where(keep, column / jnp.where(keep, left[:, None], 1.0), 0.0)
        done.append(column)
        rest = rest[:, 1:]
        along = jnp.einsum("bn,brn->br", column, rest, precision=lax.Precision.HIGHEST)
        rest = rest - along[:, :, None] * column[:, None]
    return jnp.stack(done, axis=1)
