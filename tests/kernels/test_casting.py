"""Words that cross a wire are the numbers, bit for bit."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gradcomp_jax import kernels

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
    [
        (EVERY_16, ml_dtypes.bfloat16),
        (EVERY_16, np.float16),
        (EVERY_16, np.int16),
        (np.arange(256, dtype=np.uint8), np.int8),
        (SOME_32, np.float32),
        (SOME_32, np.int32),
    ],
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
    assert kernels.to_words(x) is x
    assert kernels.from_words(x, jnp.dtype(dtype)) is x
