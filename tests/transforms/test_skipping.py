"""Who looks on hears of steps that are skipped, and a state from elsewhere can be mended."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax.transforms import SkipWatch


class Coming:
    """A count that a device has not computed yet."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.done = False

    def is_ready(self) -> bool:
        return self.done

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        assert self.done, "nobody may wait for it"
        return np.asarray(self.value)


def test_many_in_a_row_are_told_once() -> None:
    watch = SkipWatch(in_a_row=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in (0, 1, 2, 2, 3, 4):
            watch(np.float32(count))
    with pytest.warns(UserWarning, match="3 steps in a row were skipped"):
        watch(np.full((4,), 5.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in range(6, 20):
            watch(count)


def test_nothing_is_waited_for() -> None:
    watch, coming = SkipWatch(in_a_row=2), [Coming(float(i)) for i in range(4)]
    for count in coming[:3]:
        watch(count)
    for count in coming[:3]:
        count.done = True
    with pytest.warns(UserWarning, match="2 steps in a row"):
        watch(coming[3])


def test_a_number_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="in_a_row"):
        SkipWatch(0)


def test_exactly_the_entries_that_are_not_finite_are_reset() -> None:
    tx = gc.exchange(gc.compressors.topk(0.25, block=4), axis_name=None)
    state = tx.init({"a": np.zeros((2, 4), np.float32), "b": np.zeros((4, 4), np.float32)})
    first = state.memory[0][0]
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    rows[0, 1], rows[1, 2] = np.nan, -np.inf
    spoilt = jax.tree.map(lambda a: jnp.asarray(rows) if a is first.value else a, {"tx": state, "params": np.nan})
    mended, count = gc.reset_nonfinite(spoilt)
    rows[0, 1] = rows[1, 2] = 0
    assert count == 2
    np.testing.assert_array_equal(mended["tx"].memory[0][0].value, rows)
    assert mended["tx"].memory[0][1].value is state.memory[0][1].value
    assert np.isnan(mended["params"])
    again, count = gc.reset_nonfinite(mended)
    assert count == 0 and again["tx"].memory[0][0].value is mended["tx"].memory[0][0].value


@pytest.mark.slow
def test_estimates_begin_again_together() -> None:
    tx = gc.ef21(axis_name=None, density=0.25, block=4)
    state = tx.init({"a": np.zeros((8, 8), np.float32)})
    ones = jax.tree.map(lambda a: jnp.ones_like(a) if a.dtype == jnp.float32 else a, state)
    whole, count = gc.reset_nonfinite(ones)
    assert count == 0 and np.asarray(whole.total["a"]).all()
    spoilt = ones._replace(total=jax.tree.map(lambda a: a.at[(0, 0)].set(jnp.nan), ones.total))
    mended, count = gc.reset_nonfinite(spoilt)
    assert count == 1
    assert not any(np.asarray(a).any() for a in jax.tree.leaves((mended.total, mended.inner.memory)))


def test_a_state_without_an_exchange_is_refused() -> None:
    with pytest.raises(ValueError, match="whole train state"):
        gc.reset_nonfinite({"params": np.zeros(3)})
