"""Weights of narrow gradients: a worker's share may be beyond float16 where the mean is not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from tests.conformance.environments import AXIS, vmapped_init

N = 8
WEIGHTS = np.asarray([3, 1, 1, 1, 1, 1, 1, 1], np.float32)

METHODS = {
    "dgc": lambda: gc.dgc(axis_name=AXIS, density=1 / 8, momentum=0.9, clip_norm=1e9, weight_decay=1e-4),
    "ef21": lambda: gc.ef21(axis_name=AXIS, density=1 / 4),
    "one_bit_adam": lambda: gc.one_bit_adam(axis_name=AXIS, warm_up_steps=1),
    "rate": lambda: gc.rate_weighted(gc.topk_sgd(axis_name=AXIS, density=1 / 4), lambda step: 1e-3),
    "bucketed": lambda: gc.bucketed(gc.dense(axis_name=AXIS), bucket_bytes=64),
    "masked": lambda: optax.masked(gc.dense(axis_name=AXIS), {"w": True, "frozen": False}),
}


def mapped(tx: Any, params: Any) -> tuple[Any, Any]:
    state = vmapped_init(tx, params, N)
    axes = gc.state_axes(state)
    update = jax.jit(
        jax.vmap(
            lambda g, s, p, w: tx.update(g, s, p, weight=w),
            in_axes=(0, axes, None, 0),
            out_axes=(0, axes),
            axis_name=AXIS,
        )
    )
    return state, update


def skips(state: Any) -> int:
    return int(np.max(gc.transforms.skipped(state)))


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.parametrize("keep_absent", (True, False))
def test_a_mean_that_float16_holds_is_not_skipped(keep_absent: bool) -> None:
    params = {"w": np.zeros((8, 24), np.float16), "b": np.zeros(5, np.float16)}
    tx = gc.weighted(gc.dense(axis_name=AXIS), axis_name=AXIS, keep_absent=keep_absent)
    state, update = mapped(tx, params)
    gradient = {name: np.full((N, *p.shape), 30_000, p.dtype) for name, p in params.items()}
    moved, state = update(gradient, state, params, WEIGHTS)
    assert skips(state) == 0
    for value in moved.values():
        assert value.dtype == jnp.float16
        np.testing.assert_array_equal(np.asarray(value, np.float32), 30_000)


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.parametrize(("name", "dtype"), [(n, ("float16", "bfloat16")[i % 2]) for i, n in enumerate(METHODS)])
def test_every_method_takes_it_and_keeps_its_dtypes(name: str, dtype: str) -> None:
    params = {"w": jnp.zeros((8, 64), dtype), "frozen": jnp.zeros(3, dtype)}
    state, update = mapped(gc.weighted(METHODS[name](), axis_name=AXIS), params)
    before = [(a.dtype, a.shape) for a in jax.tree.leaves(state)]
    gradient = {name: jnp.full((N, *p.shape), 30_000, dtype) for name, p in params.items()}
    for _ in range(2):
        moved, state = update(gradient, state, params, WEIGHTS)
    assert skips(state) == 0
    assert [(a.dtype, a.shape) for a in jax.tree.leaves(state)] == before
    for value in moved.values():
        assert value.dtype == dtype and np.isfinite(np.asarray(value, np.float32)).all()
    assert np.asarray(moved["w"], np.float32).any()


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_what_float16_cannot_carry_of_a_weighted_mean_stays_in_the_memory() -> None:
    params = {"w": np.zeros((8, 24), np.float16)}
    code = gc.compressors.topk(1 / 64, block=64, dtype=jnp.float32)
    tx = gc.weighted(gc.exchange(code, axis_name=AXIS, collective="all_gather", mask=True), axis_name=AXIS)
    state, update = mapped(tx, params)
    gradient, sent, largest = {"w": np.full((N, 8, 24), 30_000, np.float16)}, 0.0, 0.0
    for _ in range(80):
        moved, state = update(gradient, state, params, WEIGHTS)
        value = np.asarray(moved["w"], np.float64)[0]
        sent, largest = sent + value.sum(), max(largest, value.max())
    assert largest == np.finfo(np.float16).max, "nothing was cut off"
    kept = sum(np.asarray(a, np.float64).sum() for a in jax.tree.leaves(state.memory)) / N
    np.testing.assert_allclose(sent + kept, 80 * 30_000.0 * 8 * 24, rtol=2.0**-11)


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_a_model_state_in_float16_is_a_weighted_mean_too() -> None:
    mesh = jax.sharding.Mesh(jax.devices()[:N], (AXIS,))
    tx = optax.chain(gc.weighted(gc.dense(axis_name=AXIS), axis_name=AXIS), optax.sgd(0.1))
    begun = {"mean": np.zeros(3, np.float16)}
    state = gc.init_state({"w": np.ones(3, np.float32)}, tx, mesh, axis_name=AXIS, model_state=begun)

    def loss(p: Any, x: Any, model_state: Any) -> Any:
        seen = jnp.full_like(model_state["mean"], 30_000)
        return jnp.sum(p["w"]) * x.sum() + 0 * model_state["mean"].sum().astype(jnp.float32), {"mean": seen}

    step = gc.make_train_step(loss, tx, mesh, axis_name=AXIS, weight=lambda x: x[0, 0])
    new, _ = step(state, np.tile(WEIGHTS[:, None], (1, 2)))
    assert new.model_state["mean"].dtype == jnp.float16
    np.testing.assert_array_equal(np.asarray(new.model_state["mean"], np.float32), 30_000)
