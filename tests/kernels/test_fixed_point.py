"""Fixed-point rounding against exact arithmetic."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.programs import kernels

DRAWS = 8192
KEY = jax.random.key(0)
WIDTHS = ((8, np.int8), (16, np.int16))


@functools.partial(jax.jit, static_argnames=("bits", "fraction_bits", "generator"))
def fixed(rows, key, bits, fraction_bits, generator="hash"):
    return kernels.to_fixed(rows, key, bits=bits, fraction_bits=fraction_bits, generator=generator)


@given(hnp.arrays(np.float32, (2, 5), elements=st.floats(-300, 300, width=32)), st.sampled_from((0, 7, 20)))
def test_nearest_and_neighbours(rows: np.ndarray, fraction_bits: int) -> None:
    for bits, dtype in WIDTHS:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        exact = rows.astype(np.float64) * 2.0**fraction_bits
        words = np.asarray(fixed(rows, None, bits, fraction_bits))
        assert words.dtype == dtype
        np.testing.assert_array_equal(words, np.clip(np.round(exact), low, high))
        drawn = np.asarray(fixed(rows, KEY, bits, fraction_bits))
        assert ((drawn >= np.clip(np.floor(exact), low, high)) & (drawn <= np.clip(np.ceil(exact), low, high))).all()


@pytest.mark.slow
@given(hnp.arrays(np.float32, (2, 5), elements=st.floats(-300, 300, width=32)), st.integers(0, 20))
def test_nearest_and_neighbours_of_any_grid(rows: np.ndarray, fraction_bits: int) -> None:
    test_nearest_and_neighbours.hypothesis.inner_test(rows, fraction_bits)


@pytest.mark.parametrize(("fraction_bits", "generator"), [(5, "hash"), (126, "threefry")])
def test_a_value_on_the_grid_is_never_moved(fraction_bits: int, generator: str) -> None:
    for bits, dtype in WIDTHS:
        words = np.arange(np.iinfo(dtype).min, np.iinfo(dtype).max + 1).astype(dtype).reshape(4, -1)
        rows = kernels.from_fixed(jnp.asarray(words), fraction_bits)
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows, words * 2.0**-fraction_bits)
        for key in (None, KEY):
            np.testing.assert_array_equal(fixed(rows, key, bits, fraction_bits, generator), words)


def test_beyond_the_range_it_saturates() -> None:
    rows = np.float32([[1e30, -1e30, 3.4e38, -3.4e38, 127.4, -128.4]])
    for key in (None, KEY):
        np.testing.assert_array_equal(fixed(rows, key, 8, 0)[0, :4], [127, -128, 127, -128])
        np.testing.assert_array_equal(fixed(rows, key, 16, 12)[0], [32767, -32768] * 3)
        # What overflows on the way is beyond the range as well.
        np.testing.assert_array_equal(fixed(rows, key, 16, 100)[0], [32767, -32768] * 3)
    assert int(fixed(np.float32([[-128.4]]), KEY, 8, 0)[0, 0]) == -128


@pytest.mark.parametrize("generator", ("hash", "threefry"))
def test_stochastic_rounding_is_unbiased(generator: str) -> None:
    """Two values are possible, so the mean of the draws has a known deviation: within five of it."""
    rows = np.float32([[0, 0.3, -0.004, 1.9, -0.55, 0.13, -1.9, 1e-6, -1e-6]])
    draw = jax.jit(jax.vmap(lambda key: fixed(rows, key, 8, 6, generator)))
    words = np.asarray(draw(jax.random.split(jax.random.key(2), DRAWS)), np.float64)
    exact = rows.astype(np.float64) * 64
    p = exact - np.floor(exact)
    assert (np.abs(words.mean(axis=0) - exact) <= 5 * np.sqrt(p * (1 - p) / DRAWS) + 1e-6).all()
    free = words[:, 0, 1:7]
    assert np.abs(np.corrcoef(free.T) - np.eye(6)).max() < 5 / np.sqrt(DRAWS)


def test_a_sum_of_words_is_the_sum_of_values() -> None:
    words = np.random.default_rng(0).integers(-(2**15), 2**15, (7, 2, 5)).astype(np.int16)
    total = kernels.from_fixed(np.sum(words, axis=0, dtype=np.int32), 12)
    np.testing.assert_array_equal(total, words.astype(np.float64).sum(axis=0) / 4096)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="bits must be 8 or 16, got 4"):
        kernels.to_fixed(jnp.zeros((1, 4)), None, bits=4, fraction_bits=3)
    for bad in (-1, 127):
        with pytest.raises(ValueError, match=f"fraction_bits must be between 0 and 126, got {bad}"):
            kernels.to_fixed(jnp.zeros((1, 4)), None, bits=8, fraction_bits=bad)
