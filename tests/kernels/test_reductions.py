"""Reductions of rows against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradcomp_jax import kernels as _kernels
from tests.programs import kernels

norm = jax.jit(kernels.norm_of_rows)
TINY = float(np.finfo(np.float32).tiny)


def check_norm(rows: np.ndarray) -> None:
    got = np.asarray(norm(rows))
    assert got.dtype == np.float32
    assert got.shape == rows.shape[:1]
    want = np.linalg.norm(rows.astype(np.float64), axis=1)
    largest = np.abs(rows.astype(np.float64)).max(axis=1)
    # Of a row of subnormals, the largest entry; among larger ones they may count as zeros.
    lost = TINY * np.sqrt(rows.shape[1])
    np.testing.assert_allclose(got, np.where(largest < TINY, largest, want), rtol=1e-5, atol=lost)
    assert (got >= largest * (1 - 1e-6)).all()


@pytest.mark.parametrize("block", (1, 5, 64, 1000, 4096))
@pytest.mark.parametrize("magnitude", (1.0, 1e-30, 1e30, 1e-37))
def test_norm_of_rows(block: int, magnitude: float) -> None:
    rows = np.random.default_rng(block).normal(size=(4, block)) * magnitude
    rows[1] = 0
    rows[2] = magnitude
    check_norm(rows.astype(np.float32))


@given(hnp.arrays(np.float32, (2, 7), elements=st.floats(-(2.0**120), 2.0**120, width=32)))
def test_norm_of_anything_that_has_one(rows: np.ndarray) -> None:
    check_norm(rows)


@pytest.mark.parametrize("size", (1e30, 5e37, 1e38, 3e38))
def test_a_norm_is_never_less_than_the_largest_entry(size: float) -> None:
    """Dividing by a number whose reciprocal is subnormal would give zeros."""
    rows = np.zeros((3, 64), np.float32)
    rows[0], rows[1, 5], rows[2, :2] = size, -size, (size, size / 2)
    with np.errstate(over="ignore"):
        exact = np.sqrt((rows.astype(np.float64) ** 2).sum(axis=1)).astype(np.float32)
    got = np.asarray(kernels.norm_of_rows(jnp.asarray(rows)))
    assert (got >= np.abs(rows).max(axis=1)).all()
    if size < 1e38:
        np.testing.assert_allclose(got, exact, rtol=1e-5)


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16, jnp.float16))
def test_finite_up_to_a_magnitude(dtype) -> None:
    x = np.linspace(-3, 3, 13, dtype=np.float32)
    for largest, expected in ((3.0, True), (2.9, False)):
        assert bool(kernels.all_finite(np.asarray(x, dtype), largest)) == expected
    for bad in (np.nan, np.inf, -np.inf):
        assert not kernels.all_finite(np.asarray(np.append(x, bad), dtype))
    assert kernels.all_finite(jnp.zeros((0,), dtype))


def test_sums_of_rows_are_each_arrays_own() -> None:
    large, small = np.random.default_rng(2).normal(size=(2, 3, 640)).astype(np.float32) * np.float32(
        [[[1e9]], [[1e-3]]]
    )
    got = kernels.sums_of_rows(large, small)
    assert got.dtype == np.float32
    exact = np.stack([np.asarray(x, np.float64).sum(1) for x in (large, small)], axis=1)
    np.testing.assert_allclose(got, exact, rtol=1e-4)


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16, jnp.float16))
def test_sum_of_workers(dtype) -> None:
    values = np.asarray(np.random.default_rng(0).normal(size=(5, 7, 3)), dtype)
    program = jax.jit(_kernels.sum_of_workers).lower(values).compile()
    exact = np.asarray(values, np.float64).sum(0)
    np.testing.assert_allclose(np.asarray(program(values)), exact, rtol=1e-5, atol=1e-6)
    if jax.default_backend() == "cpu":
        # What the CPU's library for reductions takes is many times slower for few long rows.
        assert " reduce(" not in program.as_text()
