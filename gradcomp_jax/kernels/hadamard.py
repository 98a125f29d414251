"""Randomized Hadamard rotation of rows: spreads every entry over its block, so that no outlier decides a scale.

Vargaftik et al., 2021, DRIVE, https://arxiv.org/abs/2105.08339, section 4.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.random import seeded_bits
from gradcomp_jax.kernels.separable import on_both_sides

_SIGN = 0x80000000  # the sign bit of a float32


def hadamard(rows: Array) -> Array:
    r"""Walsh-Hadamard transform of each row, orthonormal and its own inverse.

    As two products with small matrices, :math:`H_{ab} = H_a \otimes H_b`: 2 sqrt(block) multiplications an entry in the
    shape that matrix units are made for, where the butterfly's log2(block) stages would each be a pass over memory.

    Args:
        rows: float32 ``[rows, block]``, the block a power of two.

    Raises:
        ValueError: for another block.
    """
    block = rows.shape[1]
    if block < 1 or block & (block - 1):
        raise ValueError(f"a Hadamard rotation needs a block that is a power of two, got {block}")
    outer = 1 << ((block.bit_length() - 1) // 2)
    return on_both_sides(rows, _matrix(outer), _matrix(block // outer))


def rotate(rows: Array, seeds: Array) -> Array:
    """Random signs, then :func:`hadamard`; the same seeds on every worker give the same rotations.

    Args:
        rows: float32 ``[rows, block]``, the block a power of two.
        seeds: uint32 ``[rows]``; each row has its own signs.
    """
    return hadamard(_with_signs(rows, seeds))


def rotate_back(rows: Array, seeds: Array) -> Array:
    """Inverse of :func:`rotate`."""
    return _with_signs(hadamard(rows), seeds)


def _with_signs(rows: Array, seeds: Array) -> Array:
    flip = seeded_bits(seeds, rows.shape[1]) & jnp.uint32(_SIGN)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(rows, jnp.uint32) ^ flip, jnp.float32)


def _matrix(size: int) -> np.ndarray:
    """Sylvester's, divided by sqrt(size)."""
    matrix = np.ones((1, 1))
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(size)).astype(np.float32)
