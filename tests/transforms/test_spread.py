"""What is looked at of a large array: spread over all of it, in strides that are not too long for TPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp_jax.core.passes import NARROW, RUNS, WINDOW, places, taken


def test_a_short_stride_is_a_stride() -> None:
    x = np.arange(60 * 8).reshape(60, 8)
    where = [places(x.shape, 7), places(x.shape, 3, 1)]
    assert where == [[slice(None, None, 7)], [slice(None, None, 3)]]
    np.testing.assert_array_equal(taken(jnp.asarray(x), where), x[::7, ::3])


@pytest.mark.parametrize("shape", [(128_256, 4096), (2**24, 8), (82_815, 1024), (1, 128_256, 4096), (2**28, 1)])
@pytest.mark.parametrize("lines", [1, 5, 16, 2048])
def test_a_long_stride_is_runs_that_are_spread(shape: tuple[int, ...], lines: int) -> None:
    axis = len(shape) - 2
    n = shape[axis]
    runs = places(shape, -(-n // lines), axis)
    if len(runs) == 1 and runs[0].step:
        assert runs[0].step * 4 * max(shape[-1], NARROW) <= WINDOW
        return
    assert len(runs) == min(RUNS, lines)
    assert all(0 <= run.start < run.stop <= n for run in runs)
    starts = [run.start for run in runs]
    assert starts[0] == 0 and max(np.diff([*starts, n])) <= -(-n // len(runs))
    number = sum(run.stop - run.start for run in runs)
    assert lines / 2 < number <= lines


def test_runs_are_taken_along_their_own_axis() -> None:
    x = np.arange(2 * 40 * 3).reshape(2, 40, 3)
    where = [[slice(None, None, 1)], [slice(0, 2), slice(20, 22)], [slice(None, None, 2)]]
    np.testing.assert_array_equal(taken(jnp.asarray(x), where), x[:, [0, 1, 20, 21]][..., ::2])


def test_nothing_else_is_read() -> None:
    """A NaN elsewhere is not seen."""
    x = np.full((300_000, 16), np.nan, np.float32)
    runs = places(x.shape, 20_000)
    assert len(runs) == RUNS
    for run in runs:
        x[run] = 1.0
    assert np.isfinite(jax.jit(lambda a: taken(a, [runs]))(x)).all()
