"""Orthonormal columns against numpy's singular values and projections."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.programs import kernels

orthogonalize, unit_columns = jax.jit(kernels.orthogonalize), jax.jit(kernels.unit_columns)


def check(p: np.ndarray) -> np.ndarray:
    """Columns are orthonormal or zero, and every column of p lies in the span of those up to it."""
    got = np.asarray(orthogonalize(p))
    assert got.dtype == np.float32
    assert got.shape == p.shape
    q = got.astype(np.float64)
    used = np.abs(q).max(axis=1, initial=0.0) > 0
    gram = np.einsum("bni,bnj->bij", q, q)
    np.testing.assert_allclose(gram, np.eye(p.shape[2]) * used[:, None], atol=1e-5)
    wide = p.astype(np.float64)
    # In units of the column: what is not in the span is below the bound for dependence, and rounding.
    unit = wide / np.maximum(np.abs(wide).max(axis=1, keepdims=True, initial=0.0), np.finfo(np.float32).tiny)
    for j in range(p.shape[2]):
        first = q[:, :, : j + 1]
        left = unit[:, :, j] - np.einsum("bni,bmi,bm->bn", first, first, unit[:, :, j])
        assert (np.linalg.norm(left, axis=1) <= 3e-5 * np.linalg.norm(unit[:, :, j], axis=1)).all()
    return used


@pytest.mark.parametrize(("n", "r"), [(64, 4), (5, 5)])
def test_independent_columns(n: int, r: int) -> None:
    assert check(np.random.default_rng(n).normal(size=(3, n, r)).astype(np.float32)).all()


@pytest.mark.slow
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10_000))
def test_any_shape(n: int, r: int, seed: int) -> None:
    used = check(np.random.default_rng(seed).normal(size=(2, n, r)).astype(np.float32))
    # The first n columns of normal entries are independent, further ones cannot be.
    np.testing.assert_array_equal(used[:, n:], False)


@pytest.mark.parametrize("apart", (1e-1, 1e-2, 1e-3, 1e-4))
def test_columns_that_nearly_depend_on_each_other(apart: float) -> None:
    rng = np.random.default_rng(0)
    p = rng.normal(size=(4, 50, 1)) + apart * rng.normal(size=(4, 50, 6))
    assert check(p.astype(np.float32)).all()


def test_dependent_and_zero_columns_become_zero() -> None:
    rng = np.random.default_rng(1)
    a, b, zero = rng.normal(size=(2, 40)), rng.normal(size=(2, 40)), np.zeros((2, 40))
    used = check(np.stack([zero, a, 3 * a, b, a + b, zero, -b], axis=2).astype(np.float32))
    np.testing.assert_array_equal(used, [[False, True, False, True, False, False, False]] * 2)
    assert not check(np.zeros((2, 7, 3), np.float32)).any()
    used = check(np.full((2, 7, 3), -0.1, np.float32))
    np.testing.assert_array_equal(used, [[True, False, False]] * 2)


def test_order_of_columns_decides_signs_and_span() -> None:
    """The first column keeps its direction; of a triangular matrix with a positive diagonal the unit matrix remains."""
    p = np.triu(np.random.default_rng(2).uniform(1, 2, (1, 6, 6))).astype(np.float32)
    np.testing.assert_allclose(orthogonalize(p), np.eye(6)[None], atol=1e-5)


@pytest.mark.parametrize("magnitude", (1e-37, 1e-30, 1e-10, 1e10, 1e30, 1e37))
def test_magnitudes_do_not_matter(magnitude: float) -> None:
    p = np.random.default_rng(3).uniform(0.5, 1, size=(2, 20, 3)).astype(np.float32)
    want = np.asarray(orthogonalize(p))
    np.testing.assert_allclose(orthogonalize(p * np.float32(magnitude)), want, atol=1e-4)
    mixed = p * np.float32([magnitude, 1, 1 / magnitude])
    assert check(mixed).all()


@pytest.mark.slow
def test_many_columns_depend_on_each_other_and_have_a_bad_entry() -> None:
    """Above eight, in a loop, as below."""
    rng = np.random.default_rng(6)
    p = rng.normal(size=(2, 40, 10)) @ rng.normal(size=(2, 10, 14))
    used = check(p.astype(np.float32))
    assert used[:, :10].all() and not used[:, 10:].any()
    p[0, 5, 3] = np.nan
    got = np.asarray(orthogonalize(p.astype(np.float32)))
    assert np.isfinite(got[0, :, :3]).all() and np.isnan(got[0, :, 3:]).any(axis=0).all()
    assert np.isfinite(got[1]).all()


@pytest.mark.parametrize("magnitude", (1e-30, 1.0, 1e30))
def test_unit_columns(magnitude: float) -> None:
    """Of any length, each by itself; nothing comes of zeros, and a bad entry shows in its column."""
    q = np.random.default_rng(7).normal(size=(2, 30, 4)).astype(np.float32) * np.float32([1, magnitude, 0, 1])
    q[1, 2, 3] = np.inf
    got = np.asarray(unit_columns(q), np.float64)
    np.testing.assert_allclose(np.linalg.norm(got[:, :, :2], axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(
        got[:, :, :2] * np.linalg.norm(q[:, :, :2].astype(np.float64), axis=1)[:, None], q[:, :, :2], rtol=1e-5
    )
    assert not got[:, :, 2].any()
    assert np.isfinite(got[0]).all() and np.isnan(got[1, :, 3]).any()


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_a_bad_entry_is_seen_in_its_matrix_alone(bad: float) -> None:
    p = np.random.default_rng(4).normal(size=(2, 9, 3)).astype(np.float32)
    p[0, 5, 1] = bad
    got = np.asarray(orthogonalize(p))
    assert np.isfinite(got[0, :, 0]).all()
    assert np.isnan(got[0, :, 1]).any()
    assert np.isnan(got[0, :, 2]).any()
    np.testing.assert_array_equal(got[1], orthogonalize(p[1:])[0])
