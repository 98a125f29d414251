"""Randomized Hadamard rotation of rows: spreads every entry over its block, so that no outlier decides a scale.

Vargaftik et al., 2021, DRIVE, https://arxiv.org/abs/2105.08339, section 4.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.platforms import in_rows_on_tpu, on_cpu
from gradcomp_jax.kernels.random import fold_seeds, seeded_bits
from gradcomp_jax.kernels.separable import on_both_sides

_SIGN = 0x80000000  # the sign bit of a float32
_ANGLES = 2**31 - 2  # no worker has this number
_WHOLE = 2048
"""The longest block whose whole matrix is multiplied by: an entry takes as many multiplications."""
_MANY = 704
"""Rows from which XLA does not split the sums of a product for H100."""
_SHORTEST = 32  # entries of a piece


def hadamard(rows: Array) -> Array:
    r"""Returns the Walsh-Hadamard transform of each row, orthonormal and its own inverse.

    On CPU it is two products with small matrices, :math:`H_{ab} = H_a \otimes H_b`: 2 sqrt(block) multiplications an entry. The
    butterfly's log2(block) stages would each be a pass over memory.

    Elsewhere each product would be a pass as well, so up to a block of 2048 it is one, with all of H. Matrix units multiply in
    bfloat16: signs are exact in it, and entries are rounded, by 2**-9 of themselves at most. Sums are in float32.

    Args:
        rows: float32 ``[rows, block]``, the block a power of two.

    Raises:
        ValueError: for a block that is not a power of two.
    """
    block = rows.shape[1]
    if block < 1 or block & (block - 1):
        raise ValueError(f"a Hadamard rotation needs a block that is a power of two, got {block}")
    outer = 1 << ((block.bit_length() - 1) // 2)

    def by_two(rows: Array) -> Array:
        return on_both_sides(rows, _matrix(outer), _matrix(block // outer))

    return on_cpu(by_two, by_one if block <= _WHOLE else by_two, rows)


def by_one(rows: Array) -> Array:
    """Returns :func:`hadamard` by one product with a whole matrix, of entries rounded to bfloat16."""

    def product(rows: Array) -> Array:
        return jnp.dot(rows, _signs(rows.shape[1]), preferred_element_type=jnp.float32)

    rounded = in_rows_on_tpu(rows.astype(jnp.bfloat16))
    return lax.platform_dependent(rounded, cuda=by_pieces, default=product) * jnp.float32(rows.shape[1] ** -0.5)


def by_pieces(rows: Array) -> Array:
    """Returns bfloat16 rows times all of Sylvester's matrix of signs, as GPU does it.

    XLA would split the sums of few rows, and write up to 8 float32 arrays of parts. A row in pieces, each a row by itself, is
    many rows; sums and differences of their products are the row's.
    """
    n, block = rows.shape
    pieces = 1
    while n * pieces < _MANY and _SHORTEST * pieces < block:
        pieces *= 2
    operands = rows.reshape(n * pieces, block // pieces), _signs(block // pieces)
    # GPU would join products with one matrix, and copy what goes in and comes out.
    parts = jnp.dot(*lax.optimization_barrier(operands), preferred_element_type=jnp.float32)
    parts, signs = parts.reshape(n, pieces, block // pieces), _signs(pieces).astype(jnp.float32)
    return functools.reduce(jnp.add, (signs[:, j, None] * parts[:, j, None] for j in range(pieces))).reshape(n, block)


def _signs(size: int) -> Array:
    """Returns Sylvester's matrix in bfloat16."""
    # Made where it is used: as a constant it would be in the program once for each tensor.
    numbers = lax.iota(jnp.int32, size)
    return (1 - 2 * (lax.population_count(numbers[:, None] & numbers) & 1)).astype(jnp.bfloat16)


def rotate(rows: Array, seeds: Array, *, planes: bool = False) -> Array:
    """Flips signs at random, then applies :func:`hadamard`; the same seeds on every worker give the same rotations.

    Signs alone make sums of few values: a block with one large entry becomes numbers on a grid, and a second rotation makes a
    finer grid. With ``planes`` every pair of entries is also turned by a random angle, and no entry is on a grid.

    Args:
        rows: float32 ``[rows, block]``, the block a power of two.
        seeds: uint32 ``[rows]``; each row has its own signs and angles.
        planes: turns entry j and entry j + block / 2 in their plane, between signs and transform.
    """
    signed = _with_signs(rows, seeds)
    return hadamard(_in_planes(signed, seeds, 1.0) if planes else signed)


def rotate_back(rows: Array, seeds: Array, *, planes: bool = False) -> Array:
    """Inverts :func:`rotate`."""
    back = hadamard(rows)
    return _with_signs(_in_planes(back, seeds, -1.0) if planes else back, seeds)


def _in_planes(rows: Array, seeds: Array, direction: float) -> Array:
    """Turns planes by an angle of 2 arctan(t), t uniform in [-1, 1): with the signs, any direction of a plane is possible."""
    half = rows.shape[1] // 2
    if not half:
        return rows
    drawn = seeded_bits(fold_seeds(seeds, _ANGLES), half) >> 8
    t = drawn.astype(jnp.int32).astype(jnp.float32) * jnp.float32(2**-23) - 1.0
    # Sine and cosine of the double angle follow from the tangent, without trigonometric functions.
    both = 1.0 / (1.0 + t * t)
    cosine, sine = (1.0 - t * t) * both, direction * 2.0 * t * both
    a, b = rows[:, :half], rows[:, half:]
    return jnp.concatenate([cosine * a - sine * b, sine * a + cosine * b], axis=1)


def _with_signs(rows: Array, seeds: Array) -> Array:
    flip = seeded_bits(seeds, rows.shape[1]) & jnp.uint32(_SIGN)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(rows, jnp.uint32) ^ flip, jnp.float32)


def _matrix(size: int) -> np.ndarray:
    """Returns Sylvester's matrix, divided by sqrt(size)."""
    matrix = np.ones((1, 1))
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(size)).astype(np.float32)
