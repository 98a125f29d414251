"""What loops need besides: random numbers, a model state, micro-batches, a loss scale, narrow parameters, other states."""

from typing import Any

import flax.training.train_state
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from tests.training.problem import batch, loss, mesh_of, on, params

N = 8


def exchange(**options: Any) -> optax.GradientTransformation:
    return gc.dgc(axis_name="data", density=0.125, block=16, **options)


def chain() -> optax.GradientTransformation:
    return optax.chain(exchange(), optax.sgd(0.1))


def test_a_batch_that_micro_batches_do_not_divide() -> None:
    mesh, tx = mesh_of(N), chain()
    step = gc.make_train_step(loss, tx, mesh, accumulate=2)
    with pytest.raises(
        ValueError, match=r"accumulate=2 does not divide a worker's batch of 3.*workers times accumulate"
    ):
        step(gc.init_state(params(), tx, mesh), on(mesh, batch(0)))


def test_every_step_worker_and_micro_batch_draws_its_own() -> None:
    mesh, tx = mesh_of(2), optax.chain(gc.dense(axis_name="data"), optax.sgd(0.1))

    def draws(p: Any, data: Any, *, rngs: Any) -> Any:
        drawn = jax.random.uniform(rngs)
        return loss(p, data), {"drawn": drawn, "squared": drawn**2}

    def run(state: Any, steps: int, parts: int) -> tuple[Any, list[Any]]:
        step = gc.make_train_step(
            draws, tx, mesh, has_aux=True, rngs=5, donate=False, mean_metrics=False, accumulate=parts
        )
        seen = []
        for _ in range(steps):
            state, metrics = step(state, on(mesh, batch(0)))
            seen.append({name: np.asarray(x) for name, x in metrics["aux"].items()})
        return state, seen

    start = gc.init_state(params(), tx, mesh)
    after, alone = run(start, 2, 1)
    assert len({float(x) for seen in alone for x in seen["drawn"]}) == 4
    # A run that goes on draws what it would have drawn.
    np.testing.assert_array_equal(run(run(start, 1, 1)[0], 1, 1)[1][0]["drawn"], alone[1]["drawn"])
    _, (parted,) = run(start, 1, 3)
    # The mean of equal draws would have its square for a mean of squares.
    assert (parted["squared"] - parted["drawn"] ** 2).min() > 1e-4
    assert int(after.step) == 2


def with_statistics(p: Any, data: Any, *, model_state: Any) -> Any:
    """A running mean of the input, as batch normalisation keeps it."""
    mean = 0.5 * model_state["mean"] + 0.5 * data["x"].mean()
    return loss(p, data), {"mean": mean, "count": model_state["count"] + 1}


def statistics() -> dict[str, Any]:
    return {"mean": np.float32(1), "count": np.int32(0)}


@pytest.mark.parametrize("own", (False, True), ids=("averaged", "own"))
def test_a_model_state(own: bool) -> None:
    mesh, tx = mesh_of(2), optax.chain(gc.dense(axis_name="data"), optax.sgd(0.1))
    state = gc.init_state(params(), tx, mesh, model_state=statistics(), own_model_state=own)
    step = gc.make_train_step(with_statistics, tx, mesh)
    data = batch(0)
    for _ in range(2):
        state, _ = step(state, on(mesh, data))
    assert step._cache_size() == 1
    halves = data["x"].reshape(2, -1).mean(axis=1)
    expected = 0.25 + 0.75 * (halves if own else halves.mean())
    found = np.asarray(jax.tree.leaves(state.model_state["mean"])[0])
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert (jax.tree.leaves(state.model_state["count"])[0] == 2).all()

    # What is not finite does not get in: an average keeps the old one on all workers, an own state on its worker.
    data["x"][0] = np.nan
    state, metrics = step(state, on(mesh, data))
    assert metrics["skipped"] == 1
    after = np.asarray(jax.tree.leaves(state.model_state["mean"])[0])
    if own:
        assert after[0] == found[0]
        np.testing.assert_allclose(after[1], 0.5 * found[1] + 0.5 * halves[1], rtol=1e-6)
    else:
        assert after == found


def test_a_loss_that_returns_no_model_state() -> None:
    mesh, tx = mesh_of(2), chain()
    state = gc.init_state(params(), tx, mesh, model_state=statistics())
    step = gc.make_train_step(lambda p, data, model_state: loss(p, data), tx, mesh)
    with pytest.raises(ValueError, match=r"must return \(loss, model_state\)"):
        step(state, on(mesh, batch(0)))


class Flax(flax.training.train_state.TrainState):
    """As flax's examples have it."""

    batch_stats: Any = None


@pytest.mark.parametrize(
    "kind",
    (pytest.param(flax.training.train_state.TrainState, marks=pytest.mark.slow), Flax),
    ids=("plain", "batch_stats"),
)
def test_flax_train_state(kind: type) -> None:
    mesh, tx = mesh_of(N), chain()
    more = {"batch_stats": statistics()} if kind is Flax else {}
    objective = (lambda p, data, model_state: with_statistics(p, data, model_state=model_state)) if more else loss
    given = kind.create(apply_fn=loss, params=jax.tree.map(jnp.asarray, params()), tx=tx, **more)
    state = gc.init_state(given, tx, mesh)
    step = gc.make_train_step(objective, tx, mesh)
    ours = gc.init_state(params(), tx, mesh)
    reference = gc.make_train_step(loss, tx, mesh)
    for i in range(2):
        state, metrics = step(state, on(mesh, batch(i)))
        ours, expected = reference(ours, on(mesh, batch(i)))
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
    assert type(state) is kind and int(state.step) == 2 and state.apply_fn is loss
    assert step._cache_size() == 1
    if more:
        assert int(state.batch_stats["count"]) == 2
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given.params))


def test_metrics_have_the_diagnostics() -> None:
    mesh, tx = mesh_of(2), optax.chain(exchange(collective="all_gather"), optax.sgd(0.1))
    step = gc.make_train_step(loss, tx, mesh, diagnostics=True)
    state, metrics = step(gc.init_state(params(), tx, mesh), on(mesh, batch(0)))
    assert metrics["skipped"] == 0
    found = gc.diagnostics(state)
    assert {"exchange/steps", "exchange/memory_ratio"} <= set(found) <= set(metrics)
    for name, value in found.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6)


def half_loss(p: Any, data: Any) -> Any:
    """In float16 but for the mean: gradients overflow above a scale of some thousands."""
    half = jax.tree.map(lambda x: x.astype(jnp.float16), p)
    hidden = jnp.tanh(data["x"].astype(jnp.float16) @ half["w"] + half["b"])
    return jnp.mean((hidden @ half["v"] - data["y"].astype(jnp.float16)).astype(jnp.float32) ** 2)


@pytest.mark.standard_promotion
def test_a_loss_scale_falls_with_skipped_steps_and_rises_without() -> None:
    mesh = mesh_of(N)
    tx = gc.dynamic_loss_scale(chain(), initial=2.0**22, growth_interval=3)
    # Float16 parameters: their gradients are float16, and overflow.
    state = gc.init_state(jax.tree.map(lambda p: p.astype(np.float16), params()), tx, mesh)
    step = gc.make_train_step(half_loss, tx, mesh)
    scales, skips, losses = [], [], []
    for _ in range(24):
        scales.append(float(gc.loss_scale(state.opt_state)))
        state, metrics = step(state, on(mesh, batch(0)))
        skips.append(int(metrics["skipped"]))
        losses.append(float(metrics["loss"]))
    assert 0 < skips[-1] < 20
    bad = np.diff([0, *skips]) > 0
    ratios = np.array(scales[1:]) / np.array(scales[:-1])
    np.testing.assert_array_equal(ratios[bad[:-1]], 0.5)
    assert (ratios == 2).any()
    # The loss that is shown is the loss, whatever the scale.
    assert losses[-1] < losses[0] < 10


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_a_loss_scale_changes_no_gradient() -> None:
    mesh, found = mesh_of(2), []
    for scaled in (False, True):
        tx = gc.dynamic_loss_scale(chain(), initial=64.0) if scaled else chain()
        state, step, losses = gc.init_state(params(), tx, mesh), gc.make_train_step(loss, tx, mesh, accumulate=2), []
        for _ in range(3):
            state, metrics = step(state, on(mesh, batch(0)))
            losses.append(float(metrics["loss"]))
        found.append(losses)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-3)  # one parameter is bfloat16


def test_a_loss_scale_needs_an_exchange() -> None:
    with pytest.raises(ValueError, match="there is none in its chain"):
        gc.dynamic_loss_scale(optax.sgd(0.1)).init(params())
    # Replicas drop what is not finite before it is exchanged: no step is skipped, and the scale would never fall.
    late = gc.delayed_average(gc.dense(axis_name="data"), axis_name="data", delay=1, compensate=False)
    for replicas in (late, gc.local_sgd(gc.dense(axis_name="data"), axis_name="data", every=2)):
        with pytest.raises(ValueError, match="the scale would never fall: train with bfloat16"):
            jax.eval_shape(gc.dynamic_loss_scale(replicas).init, {"w": jnp.zeros(3)})
    with pytest.raises(ValueError, match="factor must be above 1, got 1"):
        gc.dynamic_loss_scale(chain(), factor=1)


@pytest.mark.standard_promotion
def test_small_updates_of_narrow_parameters_add_up() -> None:
    """0.001 is lost on a bfloat16 of 1; with a master copy it is not."""
    mesh = mesh_of(2)
    start = {"w": np.ones((16, 16), ml_dtypes.bfloat16)}
    lasting = {}
    for name in ("plain", "master"):
        inner = optax.chain(gc.dense(axis_name="data"), optax.sgd(1e-3))
        tx = gc.master_weights(inner) if name == "master" else inner
        state = gc.init_state(start, tx, mesh)
        step = gc.make_train_step(lambda p, x: p["w"].astype(jnp.float32).sum() + 0 * x.sum(), tx, mesh)
        for _ in range(20):
            state, _ = step(state, on(mesh, np.zeros((2, 1), np.float32)))
        assert state.params["w"].dtype == jnp.bfloat16
        lasting[name] = np.asarray(state.params["w"], np.float32)
    assert (lasting["plain"] == 1).all()
    np.testing.assert_allclose(lasting["master"], np.float32(ml_dtypes.bfloat16(0.98)))
    np.testing.assert_allclose(state.opt_state.master["w"], 0.98, rtol=1e-5)


def test_master_weights_need_the_parameters() -> None:
    tx = gc.master_weights(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"call update\(updates, state, params\)"):
        tx.update(params(), tx.init(params()))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_infinity_in_a_sum_of_batches_is_skipped(dtype: str) -> None:
    """A mean that is cast to float16 is infinite where one of its parts was; clipped, it would be trained on."""
    tx = gc.accumulate(gc.dense(axis_name=None), axis_name=None, every=2)
    leaf = jnp.zeros(3, dtype)
    state = tx.init(leaf)
    for value in (1.0, jnp.inf):
        update, state = tx.update(jnp.full_like(leaf, value), state, leaf)
    assert not update.any() and int(state.inner.skipped) == 1


def test_counters_of_a_sum_of_batches_can_be_donated() -> None:
    tx = gc.accumulate(gc.dense(axis_name=None), axis_name=None, every=2)
    state = jax.jit(lambda s: s, donate_argnums=0)(tx.init(jnp.zeros(3)))
    assert int(state.batches) == int(state.step) == 0
