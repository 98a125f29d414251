"""The best levels for normally distributed numbers. A random rotation makes any block nearly normal.

Vargaftik et al., 2021, DRIVE, https://arxiv.org/abs/2105.08339, section 3; Vargaftik et al., 2022, EDEN,
https://arxiv.org/abs/2108.08842, section 3.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np

from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.packing import pack_bits, pack_digits, unpack_bits, unpack_digits

MOST_BITS = 4


@functools.cache
def normal_codebook(bits: int) -> np.ndarray:
    """Returns the ``2 ** bits`` levels of least mean square error for a standard normal, ascending: float64, read-only.

    Each level is the mean of the numbers nearest to it (Lloyd's condition), iterated to convergence. The levels are
    symmetric about zero; for one bit they are ``-sqrt(2 / pi)`` and ``sqrt(2 / pi)``.

    Args:
        bits: 1 to 4.

    Raises:
        ValueError: for another number of bits.

    References:
        Max, 1960, "Quantizing for minimum distortion"; Lloyd, 1982, "Least squares quantization in PCM".
    """
    if not 1 <= bits <= MOST_BITS:
        raise ValueError(f"bits must be 1 to {MOST_BITS}, got {bits}; for more use quantize")
    # Only the positive half is computed, so that the levels are symmetric to the last bit.
    levels = np.linspace(0, 3, 2 ** (bits - 1) + 2)[1:-1]
    for _ in range(10_000):
        edges = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2])
        density = np.append(np.exp(-(edges**2) / 2) * math.sqrt(2 / math.pi), 0.0)
        above = np.asarray([math.erfc(e / math.sqrt(2)) for e in edges] + [0.0])
        moved = np.diff(density) / np.diff(above)
        settled = np.abs(moved - levels).max() < 1e-15
        levels = moved
        if settled:
            break
    book = np.concatenate([-levels[::-1], levels])
    book.setflags(write=False)
    return book


@functools.cache
def factor_for_bfloat16(bits: int) -> float:
    r"""Returns a factor in [1, 2) at which rounding the levels to bfloat16 makes no bias.

    Without it :math:`E[y\,Q(y)]` of a standard normal y, by which an unbiased scale divides, changes by up to 1.3 thousandths.
    With it that and the mean square of the change are below 3e-6 of :math:`E[Q(y)^2]`.

    Args:
        bits: 1 to 4.
    """
    book = normal_codebook(bits)
    inner = [math.erfc(-edge / math.sqrt(2)) / 2 for edge in (book[1:] + book[:-1]) / 2]
    weight = np.diff([0.0, *inner, 1.0])
    factors = 1 + np.arange(4096)[:, None] / 4096
    change = (factors * book).astype(jnp.bfloat16).astype(np.float64) / factors - book
    # Each level is the mean of what it stands for, so E[y Q(y)] = E[Q(y) ** 2].
    bias, error = abs(change @ (weight * book)), change**2 @ weight
    return float(factors[np.argmin(bias + error), 0])


def encode_normal(rows: Array, bits: int) -> Array:
    """Returns the nearest level of each entry, packed.

    Args:
        rows: float32 ``[rows, block]``, standard normal or nearly so; a number beyond the outermost level gets that level. A
            NaN has no level: the caller's scale must carry it.
        bits: 1 to 4.

    Returns:
        uint8 ``[rows, ceil(block * bits / 8)]``; for 3 bits uint32 ``[rows, ceil(block / 10)]``, ten levels to a word.

    Raises:
        ValueError: for another number of bits.
    """
    book = normal_codebook(bits)
    half = book.size // 2
    # The levels are symmetric, so the midpoints of one side serve both. Comparisons vectorise, a search does not.
    magnitude = jnp.abs(rows)
    step = jnp.zeros(rows.shape, jnp.int32)
    for middle in (book[half + 1 :] + book[half:-1]) / 2:
        step = step + (magnitude > jnp.float32(middle)).astype(jnp.int32)
    level = jnp.where(rows < 0, half - 1 - step, half + step)
    if bits == 3:
        return pack_digits(level, 8, word_bits=32)
    return pack_bits(level, bits)


def decode_normal(words: Array, block: int, bits: int) -> Array:
    """Inverts :func:`encode_normal` up to rounding: the levels, float32 ``[rows, block]``."""
    book = normal_codebook(bits)
    half = book.size // 2
    level = unpack_digits(words, block, 8) if bits == 3 else unpack_bits(words, block, bits).astype(jnp.int32)
    step = jnp.where(level < half, half - 1 - level, level - half)
    # A chain of selects, not a table: a look-up goes entry by entry.
    magnitude = jnp.full(level.shape, book[half], jnp.float32)
    for j in range(1, half):
        magnitude = jnp.where(step >= j, jnp.float32(book[half + j]), magnitude)
    return jnp.where(level < half, -magnitude, magnitude)
