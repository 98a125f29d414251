"""Small integers packed densely into machine words.

A row of ``n`` digits in base ``b`` becomes ``ceil(n / d)`` words of ``d`` digits each. The digits of one
word lie ``ceil(n / d)`` apart in the row (planes), so that packing is a handful of contiguous slices, which
vectorise, rather than a walk over neighbours, which does not.
"""

import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array

_WORDS = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def digits_per_word(base: int, word_bits: int) -> int:
    """The largest ``d`` with ``base ** d <= 2 ** word_bits``: 5 for base 3 in a byte.

    Raises:
        ValueError: if not even one digit fits.
    """
    if base < 2 or base > 2**word_bits:
        raise ValueError(f"base must be in [2, 2**{word_bits}], got {base}; use wider words")
    digits = 1
    while base ** (digits + 1) <= 2**word_bits:
        digits += 1
    return digits


def packed_length(n: int, base: int, word_bits: int) -> int:
    """Words that hold ``n`` digits."""
    return -(-n // digits_per_word(base, word_bits))


def plane_starts(n: int, base: int, word_bits: int) -> list[int]:
    """Where in a row of ``n`` digits each of a word's planes begins.

    The last planes begin early where the row is not a multiple of the planes: they overlap and carry some digits once
    more, so that no row has to be padded, which would copy the tensor.
    """
    width = packed_length(n, base, word_bits)
    return [min(j * width, n - width) for j in range(digits_per_word(base, word_bits))]


def pack_digits(digits: Array, base: int, *, word_bits: int = 8) -> Array:
    """Packs digits in ``[0, base)``: digit ``starts[j] + w`` is place j of word w, with :func:`plane_starts`.

    Args:
        digits: integer ``[..., n]``; values outside the range give undefined words.
        base: number of values of a digit.
        word_bits: 8, 16 or 32.

    Returns:
        uint8, uint16 or uint32 ``[..., ceil(n / d)]`` with ``d = digits_per_word(base, word_bits)``.
    """
    n = digits.shape[-1]
    width = packed_length(n, base, word_bits)
    # Arithmetic in 32 bits vectorises where that in bytes does not.
    total = jnp.zeros((*digits.shape[:-1], width), jnp.uint32)
    for j, start in enumerate(plane_starts(n, base, word_bits)):
        plane = lax.slice_in_dim(digits, start, start + width, axis=-1).astype(jnp.uint32)
        total = total + plane * jnp.uint32(base**j)
    return total.astype(_WORDS[word_bits])


def unpack_digits(words: Array, n: int, base: int) -> Array:
    """Inverse of :func:`pack_digits`: ``[..., ceil(n / d)]`` words to ``[..., n]`` digits of the words' dtype."""
    word_bits = words.dtype.itemsize * 8
    if base == 2**word_bits:
        # A digit is a word, and the base itself does not fit into one.
        return words
    width = words.shape[-1]
    wide = words.astype(jnp.uint32)
    planes = []
    for j, start in enumerate(plane_starts(n, base, word_bits)):
        # What an earlier plane gave already is left out.
        skip = min(j * width - start, width)
        if skip < width:
            plane = lax.slice_in_dim(wide, skip, width, axis=-1)
            planes.append(((plane // jnp.uint32(base**j)) % jnp.uint32(base)).astype(words.dtype))
    return jnp.concatenate(planes, axis=-1) if planes else words[..., :n]


def pack_ternary(trits: Array) -> Array:
    """Packs values in {-1, 0, 1}, five to a byte (1.6 bits each): int8 ``[..., n]`` to uint8 ``[..., ceil(n / 5)]``."""
    return pack_digits((trits + jnp.asarray(1, trits.dtype)).astype(jnp.uint8), 3)


def unpack_ternary(packed: Array, n: int) -> Array:
    """Inverse of :func:`pack_ternary`: uint8 ``[..., ceil(n / 5)]`` to int8 ``[..., n]``."""
    return unpack_digits(packed, n, 3).astype(jnp.int8) - jnp.int8(1)


def pack_bits(values: Array, bits: int) -> Array:
    """Packs unsigned values of 1, 2, 4 or 8 bits, ``8 / bits`` to a byte: ``[..., n]`` to uint8.

    Raises:
        ValueError: if ``bits`` does not divide 8.
    """
    if bits not in (1, 2, 4, 8):
        raise ValueError(f"bits must be 1, 2, 4 or 8, got {bits}; other widths go through pack_digits")
    return pack_digits(values.astype(jnp.uint8), 2**bits)


def unpack_bits(packed: Array, n: int, bits: int) -> Array:
    """Inverse of :func:`pack_bits`: uint8 words to uint8 ``[..., n]``."""
    return unpack_digits(packed, n, 2**bits)
