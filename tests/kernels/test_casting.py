"""Words that cross a wire are the numbers, bit for bit."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gradcomp_jax import kernels as plain
from tests.programs import kernels

EVERY_16 = np.arange(2**16, dtype=np.uint16)
SOME_32 = np.concatenate(
    [
        np.arange(64, dtype=np.uint32),  # zero and subnormals
        np.uint32([0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x80000000, 0x00800000]),
        np.random.default_rng(0).integers(0, 2**32, 512, dtype=np.uint32),
    ]
)


@pytest.mark.parametrize(
    ("patterns", "dtype"),
    [(EVERY_16, ml_dtypes.bfloat16), (np.arange(256, dtype=np.uint8), np.int8), (SOME_32, np.float32)],
)
def test_every_pattern_comes_back(patterns: np.ndarray, dtype: type) -> None:
    words = kernels.to_words(jnp.asarray(patterns.view(dtype)))
    assert words.dtype == patterns.dtype
    np.testing.assert_array_equal(words, patterns)
    back = kernels.from_words(words, jnp.dtype(dtype))
    assert back.dtype == dtype
    np.testing.assert_array_equal(np.asarray(back).view(patterns.dtype), patterns)


@pytest.mark.parametrize("dtype", (np.uint8, np.uint16, np.uint32))
def test_words_are_left_alone(dtype: type) -> None:
    x = jnp.arange(5).astype(dtype)
    assert plain.to_words(x) is x
    assert plain.from_words(x, jnp.dtype(dtype)) is x


@pytest.mark.parametrize(
    ("wide", "narrow", "shape"), [("uint32", 1, (3, 5)), ("uint16", 2, (2, 0)), ("uint32", 2, (7,))]
)
def test_words_split_and_join_bit_for_bit(wide: str, narrow: int, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    words = jnp.asarray(rng.integers(0, 2 ** (8 * np.dtype(wide).itemsize), shape, dtype=wide))
    parts = kernels.split_words(words, narrow)
    assert parts.dtype == f"uint{8 * narrow}"
    assert parts.size * narrow == words.size * words.dtype.itemsize
    np.testing.assert_array_equal(kernels.join_words(parts, words.dtype), words)
    assert parts.shape[:-1] == shape[:-1]
