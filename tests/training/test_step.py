"""The train step: what it computes, that it compiles once, what it leaves alone."""

import chex
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from tests.training.problem import batch, loss, mesh_of, on, params

N = 8
CHAINS = {
    "dgc": lambda: optax.chain(
        gc.dgc(axis_name="data", density=0.125, block=16, weight_decay=1e-3, clip_norm=5.0), optax.sgd(0.1)
    ),
    "terngrad": lambda: optax.chain(gc.terngrad(axis_name="data", bucket_size=40), optax.sgd(0.02, momentum=0.5)),
}


def assert_replicated(tree) -> None:
    for leaf in jax.tree.leaves(tree):
        first, *others = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert first.shape == leaf.shape
        for other in others:
            np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize(("name", "explicit", "check_vma"), [("dgc", True, True), ("terngrad", False, False)])
def test_one_program_whatever_the_mesh(name: str, explicit: bool, check_vma: bool) -> None:
    mesh = mesh_of(N, explicit=explicit)
    tx = CHAINS[name]()
    mine = jax.tree.map(jnp.asarray, params())
    state = gc.init_state(mine, tx, mesh)
    step = gc.make_train_step(loss, tx, mesh, check_vma=check_vma)
    kinds = jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), state)
    losses = []
    for i in range(4):
        given = state
        state, metrics = step(given, on(mesh, batch(i % 2)))
        losses.append(float(metrics["loss"]))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    assert step._cache_size() == 1
    assert int(state.step) == 4
    assert metrics["loss"].dtype == jnp.float32
    assert jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), state) == kinds
    assert_replicated((state.params, metrics))
    assert losses[2] < losses[0]
    assert losses[3] < losses[1]
    # The caller's parameters are neither donated nor changed.
    chex.assert_trees_all_equal(mine, params())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(mine))


def test_dense_workers_train_as_one() -> None:
    """The mean of the workers' gradients is the gradient of the whole batch."""
    mesh, tx = mesh_of(3), optax.chain(gc.dense(axis_name="data"), optax.sgd(0.1))
    # All of float32: a bfloat16 gradient is rounded on every worker before it is averaged.
    alone, sgd = jax.tree.map(lambda a: np.asarray(a, np.float32), params()), optax.sgd(0.1)
    state, step = gc.init_state(alone, tx, mesh), gc.make_train_step(loss, tx, mesh)

    @jax.jit
    def reference(alone, data):
        value, gradient = jax.value_and_grad(loss)(alone, data)
        return value, optax.apply_updates(alone, sgd.update(gradient, sgd.init(alone))[0])

    for i in range(3):
        state, metrics = step(state, batch(i))
        value, alone = reference(alone, batch(i))
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    for name, want in alone.items():
        np.testing.assert_allclose(state.params[name], want, rtol=1e-5, atol=1e-6)
    assert not np.array_equal(alone["w"], params()["w"])


@pytest.mark.slow
@pytest.mark.parametrize("replicas", (False, True))
def test_an_optimizer_that_reads_the_loss_is_given_it(replicas: bool) -> None:
    """The mean over the workers; with replicas each one's own."""
    mesh, polyak = mesh_of(3), optax.polyak_sgd(max_learning_rate=10.0)
    exchange = gc.dense(axis_name="data")
    tx = optax.chain(polyak, gc.diloco(exchange, axis_name="data")) if replicas else optax.chain(exchange, polyak)
    alone = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params())
    state, step = gc.init_state(alone, tx, mesh, replicas=replicas), gc.make_train_step(loss, tx, mesh)
    state, _ = step(state, batch(0))
    for worker in range(3):
        mine = jax.tree.map(lambda a, i=worker: a[8 * i : 8 * (i + 1)], batch(0)) if replicas else batch(0)
        value, gradient = jax.value_and_grad(loss)(alone, mine)
        updates, _ = polyak.update(gradient, polyak.init(alone), alone, value=value)
        trained = state.params["w"].value[worker] if replicas else state.params["w"]
        np.testing.assert_allclose(trained, alone["w"] + updates["w"], rtol=1e-4, atol=1e-5)


def test_aux_is_averaged_and_the_state_can_be_kept() -> None:
    mesh, tx = mesh_of(2), optax.chain(gc.dense(axis_name="data"), optax.sgd(0.1))

    def with_aux(p, data):
        return loss(p, data), {"first": data["x"][0, 0]}

    state = gc.init_state(params(), tx, mesh)
    step = gc.make_train_step(with_aux, tx, mesh, has_aux=True, donate=False)
    new, metrics = step(state, batch(0))
    half = batch(0)["x"].shape[0] // 2
    np.testing.assert_allclose(metrics["aux"]["first"], batch(0)["x"][[0, half], 0].mean(), rtol=1e-6)
    chex.assert_trees_all_equal(state.params, params())
    again, _ = step(state, batch(0))
    chex.assert_trees_all_equal(again, new)


class Linen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(2)(jnp.tanh(flax.linen.Dense(8)(x)))


class Nnx(flax.nnx.Module):
    def __init__(self, rngs: flax.nnx.Rngs):
        self.first = flax.nnx.Linear(12, 8, rngs=rngs)
        self.second = flax.nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def linen_model():
    model = Linen()
    variables = jax.jit(model.init)(jax.random.key(0), batch(0)["x"])
    return variables, lambda p, data: jnp.mean((model.apply(p, data["x"]) - data["y"]) ** 2)


def nnx_model():
    graph, state = flax.nnx.split(Nnx(flax.nnx.Rngs(0)), flax.nnx.Param)
    return state, lambda p, data: jnp.mean((flax.nnx.merge(graph, p)(data["x"]) - data["y"]) ** 2)


@pytest.mark.parametrize("model", (linen_model, nnx_model))
def test_flax(model, tmp_path) -> None:
    p, objective = model()
    mesh, tx = mesh_of(2), CHAINS["dgc"]()
    state = gc.init_state(p, tx, mesh)
    assert jax.tree.structure(state.params) == jax.tree.structure(p)
    step = gc.make_train_step(objective, tx, mesh)
    losses = []
    for _ in range(4):
        state, metrics = step(state, batch(0))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    assert step._cache_size() == 1
    assert jax.tree.structure(state.params) == jax.tree.structure(p)
    gc.save_checkpoint(tmp_path / "saved", state)
    restored = gc.restore_checkpoint(tmp_path / "saved", gc.init_state(p, tx, mesh))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    chex.assert_trees_all_equal(restored, state)


def test_metrics_of_the_workers_own_cross_nothing() -> None:
    """With an exchange that gathers, an all-reduce less; the mean over the workers is what it was."""
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    tx = optax.chain(gc.topk_sgd(axis_name="data", density=1 / 32, block=64, mask=True), optax.sgd(0.1))
    batch = jax.device_put(
        np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32), gc.data_sharding(mesh, axis_name="data")
    )

    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2), jnp.max(x)

    found = {}
    for mean in (True, False):
        state = gc.init_state({"w": jnp.ones((64, 64))}, tx, mesh)
        step = gc.make_train_step(loss, tx, mesh, has_aux=True, donate=False, mean_metrics=mean)
        sent = gc.wire_bytes(step.lower(state, batch).compile()).by("kind")
        state, metrics = step(state, batch)
        assert ("all-reduce" in sent) == mean
        found[mean] = (np.asarray(state.params["w"]), jax.tree.map(np.asarray, metrics))
    np.testing.assert_array_equal(found[True][0], found[False][0])
    for name in ("loss", "aux"):
        own = found[False][1][name]
        assert own.shape == (4,) and len(set(own.tolist())) == 4
        np.testing.assert_allclose(own.mean(), found[True][1][name], rtol=1e-6)
