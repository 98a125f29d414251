"""Narrow rows: unbiased, off by less than one step, and zeros stay zeros."""

import jax
import numpy as np
import pytest

from tests.programs import kernels

DRAWS = 2_000
BLOCK = 256
DTYPES = ("bfloat16", "int8", "float8_e4m3fn")


def hard_rows() -> np.ndarray:
    """Magnitudes over many powers of two, zeros, a block of zeros, a tiny one and the largest numbers there are."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((5, BLOCK)) * 2.0 ** rng.integers(-12, 12, (5, BLOCK))
    rows[0, :9] = 0
    rows[1] = 0
    rows[2] *= 1e-30
    rows[3] = rng.choice([-3.4e38, 3.4e38], BLOCK)
    rows[4] = rng.integers(-127, 128, BLOCK)
    rows[4, 0] = 127
    return rows.astype(np.float32)


@jax.jit
def everything(rows, keys):
    """Of each dtype its scale and what the rows come back as, for each key."""
    result = {}
    for dtype in DTYPES:
        scale = kernels.narrow_scale(rows, dtype)
        back = jax.vmap(
            lambda key, dtype=dtype, scale=scale: kernels.from_narrow(kernels.to_narrow(rows, dtype, scale, key), scale)
        )
        result[dtype] = (scale, back(keys))
    return result


@pytest.fixture(scope="module")
def found():
    rows = hard_rows()
    return rows, jax.tree.map(np.asarray, everything(rows, jax.random.split(jax.random.key(1), DRAWS)))


def step_of(rows: np.ndarray, dtype: str, scale: np.ndarray | None) -> np.ndarray:
    """The distance of an entry's two neighbours in a dtype, as the docstring has it."""
    unit = 1.0 if scale is None else np.repeat(scale.astype(np.float64), BLOCK // scale.shape[1], axis=1)
    if dtype == "int8":
        return unit * np.ones_like(rows)
    scaled = np.abs(rows / np.where(unit == 0, 1, unit))
    power = 2.0 ** np.floor(np.log2(np.where(scaled == 0, 2.0**-126, scaled)))
    return power * 2.0**-7 if dtype == "bfloat16" else np.maximum(power / 8, 2.0**-9) * unit


@pytest.mark.parametrize("dtype", DTYPES)
def test_unbiased_and_within_a_step(dtype: str, found) -> None:
    rows, result = found
    scale, back = result[dtype]
    rows, back = rows.astype(np.float64), back.astype(np.float64)
    assert np.isfinite(back).all()
    step, off = step_of(rows, dtype, scale), back - rows
    if dtype == "bfloat16":
        # Numbers beyond its range are its largest.
        off, step = np.delete(off, 3, axis=1), np.delete(step, 3, axis=0)
    # A scale is rounded too, and with it where the grid lies.
    assert (np.abs(off) <= step * (1 + 1e-4)).all()
    assert (off.std(axis=0) <= step / 2 * (1 + 1e-4)).all()
    assert (off.std(axis=0) > step / 4).any(), "nothing was rounded"
    assert (np.abs(off.mean(axis=0)) <= step * (3 / np.sqrt(DRAWS) + 2.0**-16)).all()
    assert not back[:, rows == 0].any()


def test_what_is_on_the_grid_stays(found) -> None:
    rows, result = found
    np.testing.assert_allclose(result["int8"][1][:, 4], np.tile(rows[4], (DRAWS, 1)), rtol=1e-6)
    exact = rows[0].view(np.uint32) & 0xFFFF == 0
    np.testing.assert_array_equal(result["bfloat16"][1][:, 0, exact], np.tile(rows[0, exact], (DRAWS, 1)))


def test_entries_that_share_a_scale() -> None:
    for block, width in ((1024, 1024), (4096, 1024), (256, 256), (2560, 512), (100, 100), (1025, 1025)):
        assert kernels.scale_width(block) == width
    assert [kernels.narrow_dtype(dtype, 1) for dtype in DTYPES] == ["bfloat16"] * 3
    assert [kernels.narrow_dtype(dtype, 16) for dtype in DTYPES] == list(DTYPES)
