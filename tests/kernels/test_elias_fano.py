"""Increasing numbers in Elias and Fano's code: they come back, in as many bytes as it says."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.programs import kernels


@pytest.mark.parametrize(("k", "below"), [(13, 13), (41, 4096), (700, 4096)])
def test_numbers_come_back(k: int, below: int) -> None:
    rng = np.random.default_rng(k)
    rows = np.stack([np.sort(rng.choice(below, k, replace=False)) for _ in range(5)]).astype(np.uint16)
    # The first, the last, and the same number more than once.
    rows = np.concatenate([rows, np.arange(k)[None], below - k + np.arange(k)[None], np.full((1, k), below - 1)])
    packed = kernels.to_elias_fano(rows, below)
    assert packed.dtype == jnp.uint8 and packed.shape == (8, kernels.elias_fano_bytes(k, below))
    back = kernels.from_elias_fano(packed, k, below)
    np.testing.assert_array_equal(back, rows)


def test_leading_dimensions_and_no_rows() -> None:
    rows = np.arange(24).reshape(2, 3, 4)
    back = kernels.from_elias_fano(kernels.to_elias_fano(rows, 30), 4, 30)
    np.testing.assert_array_equal(back, rows)
    assert kernels.to_elias_fano(rows[:0], 30).shape == (0, 3, kernels.elias_fano_bytes(4, 30))


@pytest.mark.parametrize("k", (4, 41, 64, 410))
def test_bytes_are_near_the_entropy(k: int) -> None:
    """Of k of 4,096 positions, each set as likely; at most half a bit more a number, and what fills up the last bytes."""
    n, p = 4096, k / 4096
    entropy = n * (-p * np.log2(p) - (1 - p) * np.log2(1 - p))
    assert entropy / 8 <= kernels.elias_fano_bytes(k, n) + k / 16
    assert kernels.elias_fano_bytes(k, n) <= (entropy + 0.6 * k) / 8 + 2
