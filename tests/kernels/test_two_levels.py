"""Two bits a value."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.programs import kernels


def oracle(row: np.ndarray) -> np.ndarray:
    size = np.abs(row).astype(np.float64)
    above = size > size.mean()
    upper = size[above].mean() if above.any() else 0.0
    lower = size[~above].mean() if (~above).any() and size.all() else 0.0
    upper, lower = (float(jnp.bfloat16(np.float32(m))) for m in (upper, lower))
    return np.where(row < 0, -1, 1) * np.where(above, upper, lower)


@pytest.mark.parametrize("k", (1, 3, 64))
def test_each_value_becomes_its_halfs_mean(k: int) -> None:
    rows = np.random.default_rng(k).normal(size=(7, k)).astype(np.float32)
    rows[1] = 0
    rows[2] = -0.7
    rows[3, 0] = 0
    words, levels = kernels.to_two_levels(jnp.asarray(rows))
    assert words.dtype == jnp.uint8 and words.shape == (7, -(-k // 4)) and levels.shape == (7, 2)
    got = np.asarray(kernels.from_two_levels(words, levels, k))
    np.testing.assert_allclose(got, [oracle(r) for r in rows], rtol=1e-6, atol=1e-7)
    assert not got[1].any() and not got[rows == 0].any()


def test_a_bad_value_shows_in_the_magnitudes() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        rows = np.ones((2, 8), np.float32)
        rows[1, 3] = bad
        _, levels = kernels.to_two_levels(jnp.asarray(rows))
        assert np.isfinite(levels[0]).all() and not np.isfinite(levels[1]).all()
