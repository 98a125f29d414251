"""Levels for a standard normal, against numerical integration and a search over all levels."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.programs import kernels

BITS = (1, 2, 3, 4)
GRID = np.linspace(-10, 10, 2_000_001)
DENSITY = np.exp(-(GRID**2) / 2) / np.sqrt(2 * np.pi) * (GRID[1] - GRID[0])


@functools.partial(jax.jit, static_argnums=1)
def both_ways(rows, bits):
    words = kernels.encode_normal(rows, bits)
    return words, kernels.decode_normal(words, rows.shape[1], bits)


def nearest(x: np.ndarray, bits: int) -> np.ndarray:
    book = kernels.normal_codebook(bits)
    return book[np.searchsorted((book[1:] + book[:-1]) / 2, x)]


@pytest.mark.parametrize("bits", BITS)
def test_each_level_is_the_mean_of_what_is_nearest(bits: int) -> None:
    book = kernels.normal_codebook(bits)
    assert book.shape == (2**bits,)
    assert book.dtype == np.float64
    assert (np.diff(book) > 0).all()
    np.testing.assert_array_equal(book, -book[::-1])
    cell = np.searchsorted((book[1:] + book[:-1]) / 2, GRID)
    weight, first = (np.bincount(cell, w, 2**bits) for w in (DENSITY, DENSITY * GRID))
    np.testing.assert_allclose(first / weight, book, atol=1e-5)


def test_one_bit_is_the_mean_magnitude() -> None:
    np.testing.assert_allclose(kernels.normal_codebook(1), [-np.sqrt(2 / np.pi), np.sqrt(2 / np.pi)], rtol=1e-14)


@pytest.mark.parametrize("bits", BITS)
def test_no_other_levels_are_better(bits: int) -> None:
    """The density is log-concave, so a stationary point is the minimum: any move makes the error larger."""

    def error(book: np.ndarray) -> float:
        cell = np.searchsorted((book[1:] + book[:-1]) / 2, GRID)
        return float(((GRID - book[cell]) ** 2 * DENSITY).sum())

    book = kernels.normal_codebook(bits)
    least = error(book)
    rng = np.random.default_rng(bits)
    for size in (1e-1, 1e-2):
        for _ in range(5):
            assert error(np.sort(book + size * rng.normal(size=book.size))) > least


@pytest.mark.parametrize("bits", BITS)
def test_error_of_a_normal_sample(bits: int) -> None:
    """Within five standard deviations of the integral."""
    rows = np.random.default_rng(bits).normal(size=(200, 1000)).astype(np.float32)
    loss = (rows.astype(np.float64) - np.asarray(both_ways(rows, bits)[1])) ** 2
    square = (GRID - nearest(GRID, bits)) ** 2
    mean = (square * DENSITY).sum()
    sigma = np.sqrt((square**2 * DENSITY).sum() - mean**2)
    assert abs(loss.mean() - mean) < 5 * sigma / np.sqrt(loss.size)


@pytest.mark.parametrize("bits", BITS)
def test_rounding_the_levels_makes_no_bias(bits: int) -> None:
    """What the levels of a normal sample are worth along the sample is what it was, unlike without the factor."""
    levels = nearest(GRID, bits)
    square = (levels**2 * DENSITY).sum()

    def change(factor: float) -> tuple[float, float]:
        rounded = (levels * factor).astype(ml_dtypes.bfloat16).astype(np.float64) / factor - levels
        return abs((rounded * GRID * DENSITY).sum()) / square, (rounded**2 * DENSITY).sum() / square

    factor = kernels.factor_for_bfloat16(bits)
    assert 1 <= factor < 2
    assert max(change(factor)) < 3e-6
    assert change(1.0)[0] > 5e-4


def check(rows: np.ndarray, bits: int) -> None:
    words, got = (np.asarray(a) for a in both_ways(rows, bits))
    n, block = rows.shape
    if bits == 3:
        assert words.dtype == np.uint32
        assert words.shape == (n, -(-block // 10))
    else:
        assert words.dtype == np.uint8
        assert words.shape == (n, -(-block * bits // 8))
    assert got.dtype == np.float32
    book = kernels.normal_codebook(bits).astype(np.float32)
    assert np.isin(got, book).all()
    # No level is nearer than the one taken, but for the rounding of the middle between two.
    distance = np.abs(rows.astype(np.float64)[..., None] - book).min(axis=-1)
    assert (np.abs(rows.astype(np.float64) - got) <= distance + 1e-6).all()


@pytest.mark.parametrize(("bits", "block"), [(1, 9), (2, 64), (3, 7), (3, 10), (4, 100)])
def test_the_nearest_level(bits: int, block: int) -> None:
    rng = np.random.default_rng(block)
    rows = np.stack(
        [rng.normal(size=block), rng.normal(size=block) * 3, np.zeros(block), rng.normal(size=block) * 1e-30]
    )
    check(rows.astype(np.float32), bits)


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_their_own_code(bits: int) -> None:
    rows = kernels.normal_codebook(bits).astype(np.float32)[None]
    np.testing.assert_array_equal(both_ways(rows, bits)[1], rows)


@given(hnp.arrays(np.float32, (2, 11), elements=st.floats(width=32, allow_nan=False)), st.sampled_from(BITS))
def test_the_nearest_level_of_anything(rows: np.ndarray, bits: int) -> None:
    got = np.asarray(both_ways(rows, bits)[1])
    check(np.clip(rows, -1e3, 1e3), bits)
    np.testing.assert_array_equal(got, both_ways(np.clip(rows, -1e3, 1e3), bits)[1])


@pytest.mark.parametrize("bits", (0, 5))
def test_another_width_is_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"bits must be 1 to 4, got {bits}"):
        kernels.encode_normal(jnp.zeros((1, 8)), bits)
