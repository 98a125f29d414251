"""Randomized Hadamard rotation of rows: spreads every entry over its block, so that no outlier decides a scale.

Vargaftik et al., 2021, DRIVE, https://arxiv.org/abs/2105.08339, section 4.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.random import hash_bits


def hadamard(rows: Array) -> Array:
    r"""Walsh-Hadamard transform of each row, orthonormal and its own inverse.

    As two products with small matrices, :math:`H_{ab} = H_a \otimes H_b`: 2 sqrt(block) multiplications an entry in the
    shape that matrix units are made for, where the butterfly's log2(block) stages would each be a pass over memory.

    Args:
        rows: float32 ``[rows, block]``, the block a power of two.

    Raises:
        ValueError: for another block.
    """
    n, block = rows.shape
    if block < 1 or block & (block - 1):
        raise ValueError(f"a Hadamard rotation needs a block that is a power of two, got {block}")
    outer = 1 << ((block.bit_length() - 1) // 2)
    left, right = _matrix(outer), _matrix(block // outer)
    # Full precision: matrix units would multiply in bfloat16 by default.
    inner = jnp.einsum("nab,bc->nac", rows.reshape(n, outer, block // outer), right, precision=lax.Precision.HIGHEST)
    return jnp.einsum("da,nac->ndc", left, inner, precision=lax.Precision.HIGHEST).reshape(n, block)


def rotate(rows: Array, key: Array) -> Array:
    """Signs drawn from the key, then :func:`hadamard`; the same key on every worker gives the same rotation."""
    return hadamard(rows * _signs(key, rows.shape[1]))


def rotate_back(rows: Array, key: Array) -> Array:
    """Inverse of :func:`rotate`."""
    return hadamard(rows) * _signs(key, rows.shape[1])


def _signs(key: Array, block: int) -> Array:
    return 1.0 - 2.0 * (hash_bits(key, (1, block)) >> 31).astype(jnp.float32)


def _matrix(size: int) -> np.ndarray:
    """Sylvester's, divided by sqrt(size)."""
    matrix = np.ones((1, 1))
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(size)).astype(np.float32)
