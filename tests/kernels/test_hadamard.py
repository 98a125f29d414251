"""The Hadamard rotation against scipy's matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from gradcomp_jax import kernels


@pytest.mark.parametrize("block", (1, 2, 8, 32, 1024))
def test_is_the_orthonormal_transform_and_its_own_inverse(block: int) -> None:
    rows = np.random.default_rng(block).normal(size=(3, block)).astype(np.float32)
    got = np.asarray(jax.jit(kernels.hadamard)(rows))
    want = rows.astype(np.float64) @ scipy.linalg.hadamard(block).T / np.sqrt(block)
    np.testing.assert_allclose(got, want, atol=2e-5)
    np.testing.assert_allclose(kernels.hadamard(jnp.asarray(got)), rows, atol=2e-5)


def test_a_rotation_spreads_an_outlier_and_comes_back() -> None:
    rows = np.zeros((2, 256), np.float32)
    rows[0, 17], rows[1] = 16.0, 1.0
    key = jax.random.key(3)
    rotated = np.asarray(kernels.rotate(rows, key))
    np.testing.assert_allclose(np.abs(rotated[0]), 1.0, atol=1e-5)
    # Without the signs a constant row would become a single entry.
    assert np.abs(rotated[1]).max() < 5
    np.testing.assert_allclose(kernels.rotate_back(jnp.asarray(rotated), key), rows, atol=1e-5)
    assert np.abs(rotated - np.asarray(kernels.rotate(rows, jax.random.key(4)))).max() > 0.5


def test_no_rows_and_a_block_that_is_no_power_of_two() -> None:
    assert kernels.hadamard(jnp.zeros((0, 8))).shape == (0, 8)
    with pytest.raises(ValueError, match="power of two, got 12"):
        kernels.hadamard(jnp.zeros((1, 12)))
