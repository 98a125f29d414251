"""The cosine transform of rows: neighbours that are alike become a few large numbers.

Peng et al., 2024, DeMo, https://arxiv.org/abs/2411.19870, section 3.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.separable import on_both_sides

WHOLE = 128
"""A row of up to this many entries is one line; a longer row is a chunk of two dimensions."""

LONGEST = 1024
"""The largest side of a chunk: its matrix is a constant of every program that transforms."""


def dct(rows: Array) -> Array:
    r"""Returns the orthonormal DCT-II of each row, which preserves norms.

    :math:`y_k = \sqrt{2/b}\, c_k \sum_i x_i \cos(\pi (2i + 1) k / 2b)`, with :math:`c_0 = \sqrt{1/2}` and otherwise 1, as
    one matrix product. A block above 128 is seen as a two-dimensional chunk ``[a, b]``, where a is the largest divisor of the
    block that is at most its square root. It is transformed along both sides, as two small products: this is DeMo's transform
    of a chunk, and not that of a line of a * b entries.

    Args:
        rows: float32 ``[rows, block]``.

    Returns:
        float32 ``[rows, block]``; in a chunk, frequency (j, k) is entry ``j * b + k``.

    Raises:
        ValueError: for a chunk with a side above 1024.
    """
    a, b = sides(rows.shape[1])
    return on_both_sides(rows, _matrix(a), _matrix(b))


def inverse_dct(rows: Array) -> Array:
    """Inverts :func:`dct` up to rounding; this is the DCT-III."""
    a, b = sides(rows.shape[1])
    return on_both_sides(rows, _matrix(a).T, _matrix(b).T)


def inverse_dct_of_few(index: Array, value: Array, block: int) -> Array:
    """Returns :func:`inverse_dct` of rows that are zero except at a few frequencies, up to rounding.

    A frequency of a chunk is the product of two cosines, so a sum of a few is one product of two narrow matrices for each
    row. No dense row of frequencies is made: accelerators would scatter into it, and read it twice.

    Args:
        index: integer ``[rows, k]``, the frequencies; one that occurs several times counts as their sum.
        value: float32 ``[rows, k]``.
        block: length of a row.

    Returns:
        float32 ``[rows, block]``.
    """
    a, b = sides(block)
    index = index.astype(jnp.int32)
    left = _cosines(lax.div(index, jnp.int32(b)), a) * value[..., None]
    right = _cosines(lax.rem(index, jnp.int32(b)), b)
    rows = jnp.einsum("nka,nkb->nab", left, right, precision=lax.Precision.HIGHEST)
    return rows.reshape(index.shape[0], block)


def are_few(k: int, block: int) -> bool:
    """Returns whether the narrow matrices of ``k`` frequencies are no larger than two rows of a block."""
    return k * sum(sides(block)) <= 2 * block


def _cosines(frequency: Array, size: int) -> Array:
    """Returns the rows of :func:`_matrix` for int32 ``[rows, k]`` frequencies, ``[rows, k, size]``: computed, not gathered."""
    frequency = frequency[..., None]
    turn = 2 * lax.broadcasted_iota(jnp.int32, (1, 1, size), 2) + 1
    # Angles are in units of a quarter turn over the size; a cosine is, up to its sign, that of the distance to a half turn.
    angle = lax.rem(turn * frequency, jnp.int32(4 * size))
    angle = jnp.minimum(angle, 4 * size - angle)
    beyond = angle > size
    part = jnp.where(beyond, 2 * size - angle, angle).astype(jnp.float32) * jnp.float32(1 / size)
    square = part * part
    cosine = jnp.full(square.shape, _TAYLOR[-1], jnp.float32)
    for coefficient in _TAYLOR[-2::-1]:
        cosine = cosine * square + jnp.float32(coefficient)
    cosine = jnp.where(beyond, -cosine, cosine) * jnp.float32(math.sqrt(2 / size))
    return jnp.where(frequency == 0, jnp.float32(math.sqrt(1 / size)), cosine)


_TAYLOR = [(-1) ** j * (math.pi / 2) ** (2 * j) / math.factorial(2 * j) for j in range(8)]
"""Coefficients of the cosine, in even powers of a fraction of a quarter turn: to 1e-10 within a quarter turn."""


def sides(block: int) -> tuple[int, int]:
    """Returns the sides of a block for :func:`dct`: (1, block) up to 128, otherwise the most nearly square [a, b].

    Raises:
        ValueError: for a block below 1, or one without a divisor that leaves both sides at most 1024.
    """
    if block < 1:
        raise ValueError(f"a cosine transform needs a block of at least 1, got {block}")
    if block <= WHOLE:
        return 1, block
    a = next(d for d in range(math.isqrt(block), 0, -1) if block % d == 0)
    if block // a > LONGEST:
        raise ValueError(
            f"a cosine transform of {block} entries has sides {a} x {block // a}, and none may exceed {LONGEST}; "
            "choose a block with more divisors, such as a power of two up to 2**20"
        )
    return a, block // a


@functools.cache
def _matrix(size: int) -> np.ndarray:
    """Returns float32 ``[size, size]``, with frequency k in row k."""
    k, i = np.arange(size)[:, None], np.arange(size)[None]
    matrix = np.sqrt(2 / size) * np.cos(np.pi * (2 * i + 1) * k / (2 * size))
    matrix[0] = np.sqrt(1 / size)
    matrix = matrix.astype(np.float32)
    matrix.setflags(write=False)
    return matrix
