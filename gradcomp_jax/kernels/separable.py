"""A separable transform of rows: two small matrix products instead of a large one."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp_jax._typing import Array

HIGHEST = lax.Precision.HIGHEST
"""Full precision: matrix units would multiply in bfloat16 by default."""


def on_both_sides(rows: Array, left: np.ndarray, right: np.ndarray) -> Array:
    r"""Turns each row, seen as a matrix X of ``[a, b]``, into :math:`L X R^T`.

    Args:
        rows: float32 ``[rows, a * b]``.
        left: float32 ``[a, a]``, L.
        right: float32 ``[b, b]``, R.

    Returns:
        float32 ``[rows, a * b]``.
    """
    n, a, b = rows.shape[0], left.shape[0], right.shape[0]
    inner = _apart(lambda x, m: jnp.einsum("nab,cb->nac", x, m, precision=HIGHEST), rows.reshape(n, a, b), right)
    if a == 1:
        return inner.reshape(n, b) * left[0, 0]
    return _apart(lambda x, m: jnp.einsum("da,nac->ndc", m, x, precision=HIGHEST), inner, left).reshape(n, a * b)


def _apart(product: Callable[[Array, Array], Array], x: Array, matrix: np.ndarray) -> Array:
    """Multiplies by a separate copy of the matrix: XLA:GPU joins products with the same one, and copies inputs and outputs."""
    return lax.platform_dependent(
        x, matrix, cuda=lambda x, matrix: product(*lax.optimization_barrier((x, matrix))), default=product
    )
