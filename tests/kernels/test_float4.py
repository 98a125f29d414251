"""Four-bit floating point without a mantissa against a search through its sixteen codes."""

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
TINY = float(np.finfo(np.float32).tiny)
LEVELS = np.asarray([0, *(2.0**e for e in range(7))])
"""Of one sign, by their codes; a usual bias has them from 1/4 to 16."""


@jax.jit
def nearest(scaled):
    return kernels.to_e3m0(scaled, None)


@jax.jit
def round_trip(rows):
    words, scale = kernels.quantize(rows, 4, format="e3m0")
    return words, scale, kernels.dequantize(words, scale, rows.shape[1], 4, "e3m0")


def test_every_code_is_its_own_number() -> None:
    codes = np.arange(16, dtype=np.int32)
    numbers = np.asarray(jax.jit(kernels.from_e3m0)(codes))
    np.testing.assert_array_equal(numbers, np.concatenate([LEVELS, -LEVELS]))
    # There is one zero that is written.
    np.testing.assert_array_equal(nearest(numbers), [0, *range(1, 8), 0, *range(9, 16)])


def test_to_the_nearest_and_in_the_middle_to_the_larger() -> None:
    middles = (LEVELS[1:] + LEVELS[:-1]) / 2
    # Below 1 there are 23 bits after the point.
    near = [middles + side * np.maximum(middles, 1) * 2.0**-22 for side in (-1, 1)]
    random = np.random.default_rng(0).uniform(0, 64, 10_000)
    values = np.concatenate([LEVELS, middles, *near, random, random / 64, [65, 1e3, 1e30]]).astype(np.float32)
    away = np.abs(values[:, None].astype(np.float64) - LEVELS)
    want = 7 - np.argmin(away[:, ::-1], axis=1)
    np.testing.assert_array_equal(nearest(np.concatenate([values, -values])) % 8, np.tile(want, 2))


def test_two_codes_are_a_byte() -> None:
    """A sign, then the exponent; a row of seven takes four bytes."""
    rows = np.float32([[1, -1 / 64, 0, 0.5, -0.25, 1 / 32, 0.001]])
    words, scale, got = (np.asarray(a) for a in round_trip(rows))
    assert words.dtype == np.uint8 and words.shape == (1, 4)
    # The first four are the low halves of the bytes, the last four the high ones: the fourth is in both.
    assert [int(word) % 16 for word in words[0]] == [7, 8 + 1, 0, 6]
    assert [int(word) // 16 for word in words[0]] == [6, 8 + 5, 2, 0]
    assert scale[0, 0] == 1 / 64
    np.testing.assert_array_equal(got, np.float32([[1, -1 / 64, 0, 0.5, -0.25, 1 / 32, 0]]))


def check(rows: np.ndarray) -> None:
    """A third of what is large, half of the smallest number of what is small; a row of too small numbers is zeros."""
    words, scale, got = (np.asarray(a) for a in round_trip(rows))
    assert words.dtype == np.uint8 and words.shape == (rows.shape[0], -(-rows.shape[1] // 2))
    assert scale.dtype == np.float32 and scale.shape == (rows.shape[0], 1)
    largest = np.abs(rows.astype(np.float64)).max(axis=1, initial=0.0, keepdims=True)
    gone = scale[:, 0] == 0
    assert (largest[gone] < 64 * TINY * (1 + 1e-6)).all() and not got[gone].any()
    np.testing.assert_array_equal(scale[~gone], np.float32(largest / 64)[~gone])
    np.testing.assert_array_equal(
        np.abs(got[~gone]).max(axis=1, initial=0.0), np.abs(rows[~gone]).max(axis=1, initial=0)
    )
    bound = np.maximum(np.abs(rows.astype(np.float64)) / 3, scale.astype(np.float64) / 2) * (1 + 1e-5) + TINY
    assert (np.abs(got - rows.astype(np.float64)) <= bound)[~gone].all()


@pytest.mark.slow
@pytest.mark.parametrize("magnitude", (1.0, 3.4e38, 1e-36, 1e-40))
def test_a_row_is_scaled_by_its_largest(magnitude: float) -> None:
    rows = np.random.default_rng(13).uniform(-1, 1, (5, 13)).astype(np.float32)
    rows[1], rows[2] = 0, 1
    check(rows * np.float32(magnitude))


@pytest.mark.slow
@given(hnp.arrays(np.float32, (2, 5), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_anything_finite_is_scaled(rows: np.ndarray) -> None:
    check(rows)


@functools.partial(jax.jit, static_argnames="generator")
def drawn(rows, generator):
    def one(key):
        words, scale = kernels.quantize(rows, 4, key, format="e3m0", generator=generator)
        return kernels.dequantize(words, scale, rows.shape[1], 4, "e3m0")

    return jax.vmap(one)(jax.random.split(jax.random.key(0), DRAWS))


@pytest.mark.parametrize("generator", ("hash", pytest.param("threefry", marks=pytest.mark.slow)))
def test_with_a_key_it_is_unbiased_between_two_neighbours(generator: str) -> None:
    rows = np.float32([[64, -64, 0, 33, -3, 1.5, 0.25, -0.01, 47.9]])
    got = np.asarray(drawn(rows, generator), np.float64)
    sizes = np.abs(rows.astype(np.float64))
    low = LEVELS[np.searchsorted(LEVELS, sizes, side="right") - 1]
    high = np.maximum(np.minimum(2 * low, 64), 1)
    assert ((np.abs(got) == low) | (np.abs(got) == high)).all()
    p = np.divide(sizes - low, high - low, where=high > low, out=np.zeros(sizes.shape))
    deviation = (high - low) * np.sqrt(p * (1 - p) / DRAWS)
    # What is a number of the format is itself in every draw.
    assert (np.abs(got.mean(axis=0) - rows) <= 5 * deviation).all()
    free = got[:, 0, 3:]
    assert np.abs(np.corrcoef(free.T) - np.eye(free.shape[1])).max() < 5 / np.sqrt(DRAWS)


def test_no_rows_and_other_widths() -> None:
    words, scale, _ = jax.eval_shape(round_trip, jax.ShapeDtypeStruct((0, 5), jnp.float32))
    assert words.shape == (0, 3) and scale.shape == (0, 1)
    with pytest.raises(ValueError, match="format='e3m0' is of 4 bits: pass bits=4, got 8"):
        kernels.quantize(np.zeros((1, 5), np.float32), 8, format="e3m0")
    with pytest.raises(ValueError, match="format must be one of 'int', 'e3m0', got 'e2m1'"):
        kernels.quantize(np.zeros((1, 5), np.float32), 4, format="e2m1")
