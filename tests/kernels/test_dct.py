"""The cosine transform against scipy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft
from hypothesis import given
from hypothesis import strategies as st

from gradcomp_jax.kernels.dct import sides
from tests.programs import kernels

dct = jax.jit(kernels.dct)
inverse = jax.jit(kernels.inverse_dct)


def slow_dct(rows: np.ndarray) -> np.ndarray:
    n, block = rows.shape
    if block <= 128:
        return scipy.fft.dct(rows, axis=1, norm="ortho")
    a = max(d for d in range(1, block + 1) if block % d == 0 and d * d <= block)
    return scipy.fft.dctn(rows.reshape(n, a, block // a), axes=(1, 2), norm="ortho").reshape(n, block)


def check(rows: np.ndarray) -> None:
    got = np.asarray(dct(rows))
    assert got.dtype == np.float32
    largest = np.abs(rows).max(initial=0)
    # A sum of a hundred products in float32, and one of as many of those.
    np.testing.assert_allclose(got, slow_dct(rows.astype(np.float64)), atol=1e-5 * largest)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), np.linalg.norm(rows, axis=1), rtol=1e-5)
    np.testing.assert_allclose(inverse(got), rows, atol=1e-5 * largest)


# One line up to 128; then chunks: square, oblong, and of a prime, which is a line again.
@pytest.mark.parametrize("block", (1, 3, 128, 1009, 4096))
def test_is_the_orthonormal_transform_and_comes_back(block: int) -> None:
    check(np.random.default_rng(block).normal(size=(3, block)).astype(np.float32))


@pytest.mark.slow
@given(st.integers(1, 400), st.integers(0, 3))
def test_of_any_block(block: int, rows: int) -> None:
    check(np.random.default_rng(block).normal(size=(rows, block)).astype(np.float32))


@pytest.mark.parametrize("block", (64, 1024))
def test_a_constant_is_one_number_and_zeros_are_zeros(block: int) -> None:
    rows = np.stack([np.full(block, 3, np.float32), np.zeros(block, np.float32)])
    got = np.asarray(dct(rows))
    np.testing.assert_allclose(got[0, 0], 3 * np.sqrt(block), rtol=1e-6)
    np.testing.assert_allclose(got[0, 1:], 0, atol=1e-4)
    assert not got[1].any()


@given(st.integers(1, 3000))
def test_sides(block: int) -> None:
    a, b = (
        (1, block) if block <= 128 else max((d, block // d) for d in range(1, 55) if block % d == 0 and d * d <= block)
    )
    if b <= 1024:
        assert sides(block) == (a, b)
    else:
        with pytest.raises(ValueError, match=f"{block} entries has sides {a} x {b}.*power of two"):
            kernels.dct(jnp.zeros((1, block)))


def test_an_empty_block_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        kernels.inverse_dct(jnp.zeros((2, 0)))


@pytest.mark.parametrize("block", (96, 1536))
def test_a_few_frequencies_need_no_dense_rows(block: int) -> None:
    rng = np.random.default_rng(block)
    k = min(block, 16)
    index = np.stack([rng.permutation(block)[:k] for _ in range(7)]).astype(np.uint16)
    value = rng.standard_normal((7, k)).astype(np.float32)
    few = np.asarray(jax.jit(kernels.inverse_dct_of_few, static_argnums=2)(index, value, block))
    dense = np.asarray(inverse(kernels.place_in_rows(jnp.asarray(index), jnp.asarray(value), block)))
    np.testing.assert_allclose(few, dense, rtol=0, atol=2e-6)


def test_frequencies_that_occur_several_times_add_up() -> None:
    rng = np.random.default_rng(0)
    index = rng.integers(0, 8, (5, 12)).astype(np.uint8)
    value = rng.standard_normal((5, 12)).astype(np.float32)
    want = np.zeros((5, 64), np.float32)
    np.add.at(want, (np.arange(5)[:, None], index), value)
    placed = jax.jit(kernels.place_repeated, static_argnums=2)(index, value, 64)
    np.testing.assert_allclose(placed, want, rtol=1e-6, atol=1e-6)
    few = jax.jit(kernels.inverse_dct_of_few, static_argnums=2)(index, value, 64)
    np.testing.assert_allclose(few, inverse(jnp.asarray(want)), rtol=0, atol=3e-6)
