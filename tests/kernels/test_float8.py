"""Eight-bit floats against numpy's casts by ml_dtypes, which round once."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.programs import kernels

FORMATS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}
TINY = float(np.finfo(np.float32).tiny)

cast = jax.jit(lambda rows, dtype: kernels.to_float8(rows, dtype)[0], static_argnums=1)
back = jax.jit(kernels.from_float8, static_argnums=1)


@jax.jit
def measure(rows):
    return kernels.largest_of_rows(rows)


scaled = jax.jit(lambda rows, largest, dtype: kernels.to_float8(rows, dtype, largest=largest), static_argnums=2)


def slow_cast(rows: np.ndarray, name: str) -> np.ndarray:
    dtype, top = FORMATS[name]
    return np.clip(rows, -top, top).astype(dtype).view(np.uint8)


def hard_values(name: str) -> np.ndarray:
    """Every number of the format, the middle between each two, and the floats next to those: double rounding shows."""
    dtype, _ = FORMATS[name]
    numbers = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    middles = (numbers[1:] + numbers[:-1]) / 2
    up, down = (np.nextafter(middles, np.float32(side * np.inf)) for side in (1, -1))
    # Not quite the next float: what a first rounding to half precision would make the middle of.
    near = [middles * np.float32(1 + side * 2.0**-p) for side in (1, -1) for p in (12, 15, 20)]
    return np.concatenate([numbers, middles, up, down, *near]).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_rounds_once_to_the_nearest(name: str) -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate([hard_values(name), rng.normal(size=20_000) * 10.0 ** rng.uniform(-12, 12, 20_000)])
    rows = values.astype(np.float32)[None]
    words = np.asarray(cast(rows, name))
    assert words.dtype == np.uint8
    np.testing.assert_array_equal(words, slow_cast(rows, name))


@pytest.mark.parametrize("name", FORMATS)
def test_every_number_is_its_own_code(name: str) -> None:
    dtype, _ = FORMATS[name]
    words = np.arange(256, dtype=np.uint8)[None]
    numbers = np.asarray(back(words, name))
    np.testing.assert_array_equal(numbers, words.view(dtype).astype(np.float32))
    finite = np.isfinite(numbers)
    np.testing.assert_array_equal(np.asarray(cast(numbers, name))[finite], words[finite])


@pytest.mark.parametrize("name", FORMATS)
def test_a_plain_cast_saturates_and_keeps_a_nan(name: str) -> None:
    top = FORMATS[name][1]
    rows = np.float32([[top * 1.2, -top * 1.2, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan, 0]])
    got = np.asarray(back(cast(rows, name), name))
    np.testing.assert_array_equal(got, np.float32([[top, -top] * 3 + [np.nan, 0]]))


def check_scaled(rows: np.ndarray, name: str) -> None:
    """The largest becomes the format's; everything within half a step of its own magnitude, or of the smallest."""
    _, top = FORMATS[name]
    largest = np.abs(rows).max(axis=1)
    words, scale = (np.asarray(a) for a in scaled(rows, measure(rows), name))
    assert words.shape == rows.shape
    assert scale.dtype == np.float32
    assert scale.shape == (rows.shape[0], 1)
    gone = scale[:, 0] == 0
    assert (largest[gone].astype(np.float64) < top * TINY * (1 + 1e-6)).all()
    np.testing.assert_allclose(scale[~gone, 0], largest[~gone].astype(np.float64) / top, rtol=1e-6)
    got = np.asarray(back(words, name, scale), np.float64)
    assert not got[gone].any()
    np.testing.assert_allclose(np.abs(got[~gone]).max(axis=1, initial=0.0), largest[~gone], rtol=1e-6)
    relative, smallest = {"e4m3": (2.0**-4, 2.0**-10), "e5m2": (2.0**-3, 2.0**-17)}[name]
    bound = np.maximum(np.abs(rows.astype(np.float64)) * relative, scale * smallest) * (1 + 1e-5) + TINY
    assert (np.abs(got - rows) <= bound)[~gone].all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("magnitude", (1.0, 1e-30, 3.4e38, 1e-37, 1e-40))
def test_a_row_is_scaled_by_its_largest(name: str, magnitude: float) -> None:
    rows = np.random.default_rng(13).uniform(-1, 1, (5, 13)).astype(np.float32)
    rows[1], rows[2] = 0, 1
    check_scaled(rows * np.float32(magnitude), name)


@given(
    hnp.arrays(np.float32, (2, 5), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    st.sampled_from(list(FORMATS)),
)
def test_anything_finite_is_scaled(rows: np.ndarray, name: str) -> None:
    check_scaled(rows, name)


def test_an_unknown_format_is_refused() -> None:
    for function in (kernels.to_float8, kernels.from_float8):
        with pytest.raises(ValueError, match="dtype must be one of 'e4m3', 'e5m2', got 'e3m4'"):
            function(jnp.zeros((1, 4)), "e3m4")
