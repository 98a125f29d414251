"""Small integers packed densely into machine words.

A row of ``n`` digits in base ``b`` becomes ``ceil(n / d)`` words of ``d`` digits each. The digits of one
word lie ``ceil(n / d)`` apart in the row (planes), so that packing takes a few contiguous slices, which
vectorise. Packing neighbours would not.
"""

import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.platforms import held_on_cpu, in_rows_on_tpu, on_cpu

_EXACT = 2**16  # words of 32 bits hold at most two digits of such a base, and half a word is a digit
_WORDS = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def digits_per_word(base: int, word_bits: int) -> int:
    """Returns the largest ``d`` with ``base ** d <= 2 ** word_bits``: 5 for base 3 in a byte.

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
    """Returns the number of words that hold ``n`` digits."""
    return -(-n // digits_per_word(base, word_bits))


def plane_starts(n: int, base: int, word_bits: int) -> list[int]:
    """Returns where each plane begins in a row of ``n`` digits.

    Where the row is not a multiple of the planes, the last planes begin early: they overlap and carry some digits twice,
    so that no row has to be padded, which would copy the tensor.
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
    # Arithmetic in 32 bits vectorises, arithmetic in bytes does not.
    total = jnp.zeros((*digits.shape[:-1], width), jnp.uint32)
    for j, start in enumerate(plane_starts(n, base, word_bits)):
        plane = lax.slice_in_dim(digits, start, start + width, axis=-1).astype(jnp.uint32)
        total = total + plane * jnp.uint32(base**j)
    return total.astype(_WORDS[word_bits])


def unpack_digits(words: Array, n: int, base: int) -> Array:
    """Inverts :func:`pack_digits`: unsigned ``[..., ceil(n / d)]`` words to ``[..., n]`` digits.

    Digits are int32, or the words themselves where a word holds one.
    """
    word_bits = words.dtype.itemsize * 8
    width = words.shape[-1]
    count = digits_per_word(base, word_bits)
    if n == 0 or count == 1:
        return words[..., :n]
    # Digits that an earlier plane gave already are left out.
    skips = [min(j * width - start, width) for j, start in enumerate(plane_starts(n, base, word_bits))]
    if word_bits == 32:
        digit = jnp.int8 if base <= 128 else jnp.int32
        joined = _joined([plane.astype(digit) for plane in _digits(words, base, count)], skips)
        # TPU joins them in other tiles than the entries': it copies what is narrow.
        return in_rows_on_tpu(joined).astype(jnp.int32)
    # Every place gets its word first, then its digit: one expression whose constants vary along the row.
    return _digit_of(_joined([words] * count, skips), width, count, base)


def _joined(planes: list[Array], skips: list[int]) -> Array:
    """Returns the planes without the skipped digits, end to end; on CPU in memory: fused, they would be read entry by entry."""
    width = planes[0].shape[-1]
    parts = [lax.slice_in_dim(p, skip, width, axis=-1) for p, skip in zip(planes, skips, strict=True) if skip < width]
    return held_on_cpu(jnp.concatenate(parts, axis=-1))


def _digit_of(words: Array, width: int, count: int, base: int) -> Array:
    """Returns the digit of each entry's place, int32, from words below 2**16; a place is ``width`` entries long."""

    def by_place(entry: Array, values: list[float], dtype: jnp.dtype | type) -> Array:
        # Comparisons, not a table: where the result is read in another shape, a look-up goes entry by entry.
        chosen = jnp.full(entry.shape, values[0], dtype)
        for j in range(1, count):
            chosen = jnp.where(entry >= j * width, jnp.asarray(values[j], dtype), chosen)
        return chosen

    def digit(words: Array, entry: Array) -> Array:
        if base & (base - 1) == 0:
            bits = base.bit_length() - 1
            shift = by_place(entry, [bits * j for j in range(count)], jnp.int32)
            return (words.astype(jnp.int32) >> shift) & jnp.int32(base - 1)
        # In float32 a multiplication divides; the half keeps every quotient away from the next integer.
        middle = words.astype(jnp.int32).astype(jnp.float32) + 0.5
        here, above = (by_place(entry, [float(base) ** -(j + up) for j in range(count)], jnp.float32) for up in (0, 1))
        return (jnp.floor(middle * here) - base * jnp.floor(middle * above)).astype(jnp.int32)

    def entries(words: Array) -> tuple[Array, Array]:
        return words, lax.broadcasted_iota(jnp.int32, words.shape, words.ndim - 1)

    # The barrier makes the positions depend on these words: from a loop over workers CPU would hoist them, a dense array each.
    return on_cpu(lambda w: digit(*lax.optimization_barrier(entries(w))), lambda w: digit(*entries(w)), words)


def _digits(words: Array, base: int, count: int) -> list[Array]:
    """Returns the ``count`` digits of words of 32 bits, int32, lowest first."""
    if base & (base - 1) == 0:
        bits = base.bit_length() - 1
        return [((words >> (bits * j)) & jnp.uint32(base - 1)).astype(jnp.int32) for j in range(count)]
    # Halves have so few digits that float32 divides them exactly: integers have no vector instruction for division.
    low = count // 2
    cut = jnp.uint32(base**low)
    found = []
    for half, digits in ((words % cut, low), (words // cut, count - low)):
        if base > _EXACT:
            found += [half.astype(jnp.int32)] * digits
            continue
        rest = half.astype(jnp.int32).astype(jnp.float32)
        for _ in range(digits - 1):
            above = jnp.floor((rest + 0.5) * jnp.float32(1 / base))
            found.append((rest - above * base).astype(jnp.int32))
            rest = above
        if digits:
            found.append(rest.astype(jnp.int32))
    return found


def pack_ternary(trits: Array) -> Array:
    """Packs values in {-1, 0, 1}, five to a byte (1.6 bits each): int8 ``[..., n]`` to uint8 ``[..., ceil(n / 5)]``."""
    return pack_digits((trits + jnp.asarray(1, trits.dtype)).astype(jnp.uint8), 3)


def unpack_ternary(packed: Array, n: int) -> Array:
    """Inverts :func:`pack_ternary`: uint8 ``[..., ceil(n / 5)]`` to int8 ``[..., n]``."""
    return (unpack_digits(packed, n, 3) - 1).astype(jnp.int8)


def pack_bits(values: Array, bits: int) -> Array:
    """Packs unsigned values of 1, 2, 4 or 8 bits, ``8 / bits`` to a byte: ``[..., n]`` to uint8.

    Raises:
        ValueError: if ``bits`` does not divide 8.
    """
    if bits not in (1, 2, 4, 8):
        raise ValueError(f"bits must be 1, 2, 4 or 8, got {bits}; other widths go through pack_digits")
    return pack_digits(values.astype(jnp.uint8), 2**bits)


def unpack_bits(packed: Array, n: int, bits: int) -> Array:
    """Inverts :func:`pack_bits`: uint8 words to uint8 ``[..., n]``."""
    return unpack_digits(packed, n, 2**bits).astype(jnp.uint8)
