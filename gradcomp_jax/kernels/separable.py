"""A transform of rows that is one of two sides: two small matrix products in place of one that is large."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp_jax._typing import Array


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
    # Full precision: matrix units would multiply in bfloat16 by default.
    inner = jnp.einsum("nab,cb->nac", rows.reshape(n, a, b), right, precision=lax.Precision.HIGHEST)
    if a == 1:
        return inner.reshape(n, b) * left[0, 0]
    return jnp.einsum("da,nac->ndc", left, inner, precision=lax.Precision.HIGHEST).reshape(n, a * b)
