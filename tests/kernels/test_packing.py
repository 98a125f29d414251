"""Packing against an oracle that walks over the words with Python's own integers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradcomp_jax.kernels.packing import digits_per_word
from tests.programs import kernels

SIZES = (0, 4, 5, 6, 1281)
DTYPES = {8: np.uint8, 16: np.uint16, 32: np.uint32}
# Powers just inside and outside of what a word holds, digits that fill half a word, and a whole one.
LARGE = {8: (255,), 16: (257,), 32: (401, 2**32)}


def slow_pack(digits: np.ndarray, base: int, word_bits: int) -> np.ndarray:
    """One word at a time: place j of word w holds digit j * width + w, or of the last ``width`` digits the w-th."""
    per = 0
    while base ** (per + 1) <= 2**word_bits:
        per += 1
    *lead, n = digits.shape
    width = -(-n // per)
    words = np.zeros((*lead, width), DTYPES[word_bits])
    for where in np.ndindex(*lead, width):
        *row, w = where
        places = [min(j * width, n - width) + w for j in range(per)]
        words[where] = sum(int(digits[(*row, i)]) * base**j for j, i in enumerate(places))
    return words


@functools.partial(jax.jit, static_argnums=(1, 2))
def both_ways(digits: jax.Array, base: int, word_bits: int) -> tuple[jax.Array, jax.Array]:
    words = kernels.pack_digits(digits, base, word_bits=word_bits)
    return words, kernels.unpack_digits(words, digits.shape[-1], base)


def check(digits: np.ndarray, base: int, word_bits: int) -> None:
    words, back = both_ways(digits, base, word_bits)
    assert words.dtype == DTYPES[word_bits]
    assert back.dtype == (words.dtype if digits_per_word(base, word_bits) == 1 or digits.shape[-1] == 0 else np.int32)
    assert words.shape == (*digits.shape[:-1], kernels.packed_length(digits.shape[-1], base, word_bits))
    np.testing.assert_array_equal(words, slow_pack(digits, base, word_bits))
    np.testing.assert_array_equal(back, digits)


@pytest.mark.parametrize("word_bits", (8,))
def test_every_small_base(word_bits: int) -> None:
    rng = np.random.default_rng(word_bits)
    for base in range(2, 18):
        n = 2 * digits_per_word(base, word_bits) + 1
        digits = rng.integers(0, base, (2, n)).astype(np.uint32)
        # The largest word there is: no carry may be lost.
        digits[0] = base - 1
        check(digits, base, word_bits)


@pytest.mark.parametrize(("word_bits", "base"), [(bits, base) for bits, bases in LARGE.items() for base in bases])
def test_large_bases(word_bits: int, base: int) -> None:
    digits = np.random.default_rng(base).integers(0, base, (2, 5)).astype(np.uint32)
    digits[0] = base - 1
    check(digits, base, word_bits)


@pytest.mark.parametrize("word_bits", (8, 16, 32))
def test_nothing_packs_into_nothing(word_bits: int) -> None:
    check(np.zeros((3, 0), np.uint32), 3, word_bits)
    check(np.zeros((0, 7), np.uint32), 3, word_bits)


@pytest.mark.parametrize("size", SIZES)
def test_ternary(size: int) -> None:
    trits = np.random.default_rng(size).integers(-1, 2, (2, size)).astype(np.int8)
    packed, back = jax.jit(lambda t: (p := kernels.pack_ternary(t), kernels.unpack_ternary(p, size)))(trits)
    assert packed.dtype == jnp.uint8
    assert packed.shape == (2, -(-size // 5))
    np.testing.assert_array_equal(packed, slow_pack(trits + 1, 3, 8))
    assert back.dtype == jnp.int8
    np.testing.assert_array_equal(back, trits)


def test_ternary_takes_eight_fifths_of_a_bit() -> None:
    packed = jax.eval_shape(kernels.pack_ternary, jax.ShapeDtypeStruct((4, 1280), jnp.int8))
    assert packed.size * packed.dtype.itemsize * 8 == 1.6 * 4 * 1280


@given(hnp.arrays(np.int8, (1, 6), elements=st.integers(-1, 1)))
def test_any_ternary_comes_back(trits: np.ndarray) -> None:
    packed = kernels.pack_ternary(jnp.asarray(trits))
    np.testing.assert_array_equal(packed, slow_pack(trits + 1, 3, 8))
    np.testing.assert_array_equal(kernels.unpack_ternary(packed, 6), trits)


@pytest.mark.parametrize(("size", "bits"), [(7, 1), (9, 2), (1, 4), (8, 8), (0, 1)])
def test_bits(bits: int, size: int) -> None:
    values = np.random.default_rng(bits).integers(0, 2**bits, (2, size)).astype(np.uint8)
    packed, back = jax.jit(lambda v: (p := kernels.pack_bits(v, bits), kernels.unpack_bits(p, size, bits)))(values)
    assert packed.shape == (2, -(-size * bits // 8))
    np.testing.assert_array_equal(packed, slow_pack(values, 2**bits, 8))
    np.testing.assert_array_equal(back, values)


@pytest.mark.parametrize(
    ("base", "word_bits", "digits"), [(3, 8, 5), (2, 8, 8), (17, 32, 7), (129, 32, 4), (256, 8, 1)]
)
def test_digits_per_word(base: int, word_bits: int, digits: int) -> None:
    assert digits_per_word(base, word_bits) == digits


def test_length_is_that_of_the_packed_array() -> None:
    for base, word_bits, size in ((3, 8, 0), (3, 8, 1281), (17, 32, 8), (2, 16, 33)):
        packed = jax.eval_shape(
            lambda d, b=base, w=word_bits: kernels.pack_digits(d, b, word_bits=w),
            jax.ShapeDtypeStruct((size,), jnp.uint32),
        )
        assert kernels.packed_length(size, base, word_bits) == packed.shape[-1]


@pytest.mark.parametrize("base", (-1, 0, 1, 257))
def test_a_base_that_does_not_fit_is_refused(base: int) -> None:
    with pytest.raises(ValueError, match=rf"base must be in \[2, 2\*\*8\], got {base}; use wider words"):
        kernels.pack_digits(jnp.zeros((4,), jnp.uint8), base)


@pytest.mark.parametrize("bits", (0, 3, 16))
def test_a_width_that_does_not_divide_a_byte_is_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"bits must be 1, 2, 4 or 8, got {bits}.*pack_digits"):
        kernels.pack_bits(jnp.zeros((4,), jnp.uint8), bits)
