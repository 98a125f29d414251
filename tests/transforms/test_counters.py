"""Counters near 2**31: nothing begins anew, periods go on, nothing is negative."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax._counters import NEAR_THE_END, count_on
from tests.marks import slow_but

LAST = 2**31 - 1


@pytest.mark.parametrize("cycle", (1, 3, 100, 2**29 + 1))
def test_the_successor(cycle: int) -> None:
    ordinary = np.array([0, 1, NEAR_THE_END - 1], np.int32)
    late = np.array([NEAR_THE_END, LAST - 1, LAST], np.int32)
    with jax.numpy_dtype_promotion("strict"):
        np.testing.assert_array_equal(count_on(jnp.asarray(ordinary), cycle=cycle), ordinary + 1)
        after = np.asarray(count_on(jnp.asarray(late), cycle=cycle))
    assert after.dtype == np.int32
    np.testing.assert_array_equal((after.astype(np.int64) - late - 1) % cycle, 0)
    assert (after >= 2**29 - 2**24).all() and (after < NEAR_THE_END).all()


EVERY, WORKERS = 3, 2


def inner() -> Any:
    return gc.dense(axis_name="data")


METHODS = {
    "dgc": lambda: gc.dgc(axis_name="data", density=0.25, block=16, warm_up=((2, 0.75),)),
    "diloco": lambda: gc.diloco(inner(), axis_name="data", every=EVERY, parts=2),
    "elastic_average": lambda: gc.elastic_average(inner(), axis_name="data", every=EVERY),
    "delayed_average": lambda: gc.delayed_average(inner(), axis_name="data", delay=5, every=EVERY),
    "accumulate": lambda: gc.accumulate(inner(), axis_name="data", every=EVERY),
    "one_bit_adam": lambda: gc.one_bit_adam(axis_name="data", warm_up_steps=2, block=16),
    "rate_weighted": lambda: gc.rate_weighted(
        gc.topk_sgd(axis_name="data", block=16), lambda step: jnp.where(step < 10, 0.5, 0.25)
    ),
}
COUNTERS = ("step", "taken", "skipped", "dropped", "batches")


def counters(state: Any) -> dict[str, Any]:
    paths = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(p): x for p, x in paths if x.dtype == jnp.int32 and _counts(p)}


def _counts(path: Any) -> bool:
    return any(getattr(key, "name", None) in COUNTERS for key in path)


def started_at(state: Any, number: int) -> Any:
    """The state with its counters of steps at a number."""
    names = ("step", "taken")

    def start(path: Any, x: Any) -> Any:
        return np.full(x.shape, number, np.int32) if getattr(path[-1], "name", None) in names else x

    return jax.tree_util.tree_map_with_path(start, state)


@pytest.mark.parametrize("name", slow_but(("delayed_average",), METHODS))
def test_a_run_that_passes_the_end_goes_on_as_one_that_does_not(name: str) -> None:
    tx, shape = METHODS[name](), (WORKERS, 6, 16)
    rng = np.random.default_rng(0)

    def drawn() -> dict[str, np.ndarray]:
        return {name: rng.normal(size=shape).astype(np.float32) for name in "vw"}

    params = drawn()
    one_worker = jax.tree.map(lambda x: x[0], params)
    axes = gc.state_axes(jax.eval_shape(lambda p: tx.init(p), one_worker))
    init = jax.jit(jax.vmap(tx.init, axis_name="data", axis_size=WORKERS, out_axes=axes))
    update = jax.jit(jax.vmap(tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name="data"))
    fresh = init(params)
    # A multiple of every period apart.
    late, early = (started_at(fresh, number) for number in (LAST - 1, LAST - 1 - 600_000_000))
    for _ in range(8):
        gradient = drawn()
        after_late, late = update(gradient, late, params)
        after_early, early = update(gradient, early, params)
        jax.tree.map(np.testing.assert_array_equal, after_late, after_early)
    found = counters(late)
    assert found and all((np.asarray(x) >= 0).all() for x in found.values())
