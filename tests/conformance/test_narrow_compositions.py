"""Narrow memories inside what surrounds an exchange: the state keeps its dtypes, and training goes on."""

import jax
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.memory.narrow import is_narrow

N = 4
OPTIONS = {"density": 1 / 16, "block": 64}


def narrow(name: str, dtype: str = "int8", **options):
    return getattr(gc, name)(**{"axis_name": "data", **OPTIONS, "memory_dtype": dtype, **options})


AROUND = {
    "warm-up": lambda: narrow("dgc", warm_up=((2, 0.25),)),
    "buckets": lambda: gc.bucketed(narrow("dgc", "float8_e4m3fn"), bucket_bytes=2048),
    "hierarchy": lambda: gc.hierarchical(narrow("topk_sgd", axis_name="data"), axis_name="data", inner_axis_name="in"),
    "delay": lambda: gc.delayed_average(narrow("dgc"), axis_name="data", delay=2),
}


def loss(params, batch):
    return sum(jax.numpy.mean((batch @ w - 1) ** 2) for w in params.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", AROUND)
def test_what_surrounds_an_exchange_knows_nothing_of_it(name: str) -> None:
    tx = optax.chain(AROUND[name](), optax.sgd(2.0 if name == "hierarchy" else 0.3))
    axis = ("data", "in") if name == "hierarchy" else ("data",)
    sizes = (2, 2) if name == "hierarchy" else (N,)
    mesh = jax.make_mesh(sizes, axis, devices=jax.devices()[:N])
    given = {"axis_name": axis if len(axis) > 1 else "data"}
    rng = np.random.default_rng(0)
    params = {k: (rng.normal(size=(32, n)) / 6).astype(np.float32) for k, n in (("a", 24), ("b", 40), ("c", 33))}
    state = gc.init_state(params, tx, mesh, replicas=name == "delay", **given)
    step = gc.make_train_step(loss, tx, mesh, **given)
    assert any(map(is_narrow, jax.tree.leaves(state, is_leaf=is_narrow)))
    before, losses = jax.tree.map(lambda x: (x.shape, x.dtype), state), []
    for _ in range(30):
        batch = jax.device_put(rng.normal(size=(16, 32)).astype(np.float32), gc.data_sharding(mesh, **given))
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == before
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    assert not np.asarray(metrics["skipped"]).any()
