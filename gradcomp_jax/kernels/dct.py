"""The cosine transform of rows: neighbours that are alike become a few large numbers.

Peng et al., 2024, DeMo, https://arxiv.org/abs/2411.19870, section 3.
"""

import functools
import math

import numpy as np

from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.separable import on_both_sides

WHOLE = 128
"""Up to this block a row is one line; a longer one is a chunk of two dimensions."""

LONGEST = 1024
"""The larger side of a chunk: its matrix is a constant of every program that transforms."""


def dct(rows: Array) -> Array:
    r"""Returns the orthonormal DCT-II of each row: norms stay what they are.

    :math:`y_k = \sqrt{2/b}\, c_k \sum_i x_i \cos(\pi (2i + 1) k / 2b)`, with :math:`c_0 = \sqrt{1/2}` and otherwise 1, as
    one matrix product. A block above 128 is seen as a two-dimensional chunk ``[a, b]``, a the largest divisor of the block
    that is at most its square root, and is transformed along both, as two small products: this is DeMo's transform of a
    chunk, and not the one of a line of a * b entries.

    Args:
        rows: float32 ``[rows, block]``.

    Returns:
        float32 ``[rows, block]``; of a chunk, frequency (j, k) is entry ``j * b + k``.

    Raises:
        ValueError: for a chunk with a side above 1024.
    """
    a, b = sides(rows.shape[1])
    return on_both_sides(rows, _matrix(a), _matrix(b))


def inverse_dct(rows: Array) -> Array:
    """Inverts :func:`dct` up to rounding: the DCT-III."""
    a, b = sides(rows.shape[1])
    return on_both_sides(rows, _matrix(a).T, _matrix(b).T)


def sides(block: int) -> tuple[int, int]:
    """Returns what :func:`dct` sees a block as: (1, block) up to 128, otherwise the most nearly square [a, b].

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
    """Float32 ``[size, size]``: frequency k in row k."""
    k, i = np.arange(size)[:, None], np.arange(size)[None]
    matrix = np.sqrt(2 / size) * np.cos(np.pi * (2 * i + 1) * k / (2 * size))
    matrix[0] = np.sqrt(1 / size)
    matrix = matrix.astype(np.float32)
    matrix.setflags(write=False)
    return matrix
