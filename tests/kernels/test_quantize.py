"""Block-scaled int8 against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradcomp_jax import kernels

DRAWS = 8192
TINY = float(np.finfo(np.float32).tiny)
nearest = jax.jit(lambda rows: kernels.quantize_int8(rows))
decode = jax.jit(kernels.dequantize_int8)


@functools.partial(jax.jit, static_argnames=("generator",))
def draw(rows, key, generator):
    return jax.vmap(lambda k: kernels.quantize_int8(rows, k, generator=generator))(jax.random.split(key, DRAWS))


def check_nearest(rows: np.ndarray) -> None:
    """Every entry within half a step; a row too small for a normal scale may decode to zeros."""
    values, scale = (np.asarray(a) for a in nearest(rows))
    assert values.dtype == np.int8
    assert scale.dtype == np.float32
    assert scale.shape == (rows.shape[0], 1)
    assert np.abs(values.astype(int)).max(initial=0) <= 127
    largest = np.abs(rows.astype(np.float64)).max(axis=1, initial=0.0)[:, None]
    small = largest < 127 * TINY
    np.testing.assert_allclose(scale, np.where(small & (scale == 0), 0, largest / 127), rtol=1e-6)
    got = np.asarray(decode(values, scale))
    assert np.isfinite(got).all()
    step = np.where(scale > 0, largest / 127, 2 * 128 * TINY)
    assert (np.abs(got - rows.astype(np.float64)) <= step * (0.5 + 1e-4)).all()


@pytest.mark.parametrize("magnitude", (1.0, 1e30, 3.4028235e38, 1e-30, 1.5e-36, 1e-37, 1e-40, 1e-45))
def test_half_a_step_at_any_magnitude(magnitude: float) -> None:
    rows = np.random.default_rng(0).uniform(-1, 1, (4, 13)).astype(np.float32)
    rows[0, 3], rows[1, 0] = 1, -1
    check_nearest(rows * np.float32(magnitude))


@pytest.mark.parametrize("block", (1, 13))
def test_zeros_constants_and_largest_entries(block: int) -> None:
    rows = np.stack([np.full(block, v, np.float32) for v in (0, 0.1, -7, 3.4028235e38)])
    check_nearest(rows)
    values, scale = nearest(rows)
    assert scale[0, 0] == 0
    np.testing.assert_array_equal(values, np.repeat([[0], [127], [-127], [127]], block, axis=1))


def test_padding_does_not_move_the_scale() -> None:
    rows = np.random.default_rng(3).normal(size=(2, 13)).astype(np.float32)
    values, scale = kernels.quantize_int8(rows)
    more_values, more_scale = kernels.quantize_int8(np.pad(rows, ((0, 1), (0, 3))))
    np.testing.assert_array_equal(more_values[:2, :13], values)
    np.testing.assert_array_equal(more_scale[:2], scale)
    assert not np.asarray(more_values[2]).any()
    assert not np.asarray(more_values[:, 13:]).any()


@given(hnp.arrays(np.float32, (2, 5), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_half_a_step_for_anything_finite(rows: np.ndarray) -> None:
    check_nearest(rows)


@pytest.mark.parametrize("generator", ("hash", "threefry"))
def test_stochastic_rounding_is_unbiased(generator: str) -> None:
    rows = np.float32([[1, -1, 0, 0.3, -0.004], [127, 0.25, -0.5, 63.9, -126.99]])
    values, scale = (np.asarray(a) for a in draw(rows, jax.random.key(0), generator))
    # The scale is not a matter of chance.
    assert (scale == np.asarray(nearest(rows)[1])).all()
    exact = rows.astype(np.float64) / scale[0]
    low = np.floor(exact + 1e-5)
    # Only the two neighbours are ever taken, and the entry of largest magnitude is itself.
    assert ((values >= low - 1e-9) & (values <= np.ceil(exact - 1e-5))).all()
    p = np.clip(exact - low, 0, 1)
    deviation = np.sqrt(p * (1 - p) / DRAWS)
    assert (np.abs(values.mean(axis=0, dtype=np.float64) - exact) <= 5 * deviation + 1e-4).all()


def test_stochastic_zeros_and_no_rows() -> None:
    values, scale = kernels.quantize_int8(jnp.zeros((2, 5)), jax.random.key(0))
    assert not np.asarray(values).any()
    assert not np.asarray(scale).any()
    values, scale = kernels.quantize_int8(jnp.zeros((0, 5)))
    assert values.shape == (0, 5)
    assert scale.shape == (0, 1)
    assert decode(values, scale).shape == (0, 5)
