"""Weights against NumPy and against the union of batches, where they may stand, what they cost, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import gradcomp_jax as gc
from gradcomp_jax.memory import narrow
from tests.conformance.environments import AXIS, WORKERS, environment, exchange_state, mesh_of
from tests.conformance.test_participation import carried, with_weights

slow = pytest.mark.slow


def on_one_device(tx: Any) -> Any:
    return environment("vmap", carried(gc.weighted(tx, axis_name=AXIS)))


def loss(params: Any, batch: Any) -> Any:
    """The mean over the examples that are no padding: NaN where there are none."""
    error = jnp.square(batch["x"] @ params["w"] - batch["y"]).sum(axis=1)
    return jnp.sum(jnp.where(batch["real"], error, 0.0)) / jnp.sum(batch["real"], dtype=jnp.float32)


def padded_batch(examples: tuple[int, ...] = (4, 0, 1, 3, 4, 2, 0, 4)) -> tuple[Any, Any]:
    """Four places on each worker, of which some are padding with NaNs in it; and the examples by themselves."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(WORKERS, 4, 6)).astype(np.float32)
    y = rng.normal(size=(WORKERS, 4, 3)).astype(np.float32)
    real = np.arange(4) < np.asarray(examples)[:, None]
    union = {"x": x[real], "y": y[real], "real": np.ones(real.sum(), bool)}
    y = np.where(real[..., None] | real.any(axis=1)[:, None, None], y, np.nan)
    flat = {"x": x.reshape(-1, 6), "y": y.reshape(-1, 3).astype(np.float32), "real": real.reshape(-1)}
    return flat, union


def examples_of(batch: Any) -> Any:
    return jnp.sum(batch["real"])


@slow
def test_workers_own_metrics_and_model_states_stay_their_own() -> None:
    batch, _ = padded_batch((4,) * WORKERS)
    batch["real"] = batch["real"].copy()
    mesh, params = mesh_of(AxisType.Auto), {"w": np.zeros((6, 3), np.float32)}
    tx = optax.chain(gc.weighted(gc.dense(axis_name=AXIS), axis_name=AXIS), optax.sgd(0.1))
    found = []
    for weight in (None, lambda b: jax.lax.axis_index(AXIS) + 1):
        state = gc.init_state(params, tx, mesh, model_state={"m": np.zeros(6, np.float32)}, own_model_state=True)
        own = gc.make_train_step(
            lambda p, b, model_state: (loss(p, b), {"m": b["x"].mean(axis=0)}),
            tx,
            mesh,
            weight=weight,
            mean_metrics=False,
        )
        new, metrics = own(state, batch)
        found.append((np.asarray(metrics["loss"]), np.asarray(new.model_state["m"].value), new.params["w"]))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])
    assert not np.allclose(found[0][2], found[1][2])


@slow
@pytest.mark.parametrize(("dtype", "collective"), [("float8_e4m3fn", "all_gather"), ("int8", "two_phase")])
def test_narrow_memories_of_absent_workers(dtype: str, collective: str) -> None:
    """Bit by bit where nothing comes back, and otherwise off by one step of the grid."""
    code = gc.compressors.block_quantized(bits=4, block=64)
    tx = gc.exchange(code, axis_name=AXIS, memory=gc.memory.residual(dtype=dtype), collective=collective, mask=True)
    world, params, rng = on_one_device(tx), {"w": np.zeros((16, 64), np.float32)}, np.random.default_rng(0)

    def opened(state: Any) -> np.ndarray:
        kept = jax.tree.map(
            lambda p: p.value, exchange_state(state).memory[0][0], is_leaf=lambda n: isinstance(n, gc.PerDevice)
        )
        return np.asarray(jax.vmap(narrow.opened)(kept), np.float64)

    state, weights = world.init(params), np.asarray([3, 0, 1, 2, 5, 0, 1, 4])
    _, old = world.update(
        with_weights({"w": rng.normal(size=(WORKERS, 16, 64)).astype(np.float32)}, [1] * 8), state, params
    )
    g = rng.normal(size=(WORKERS, 16, 64)).astype(np.float32)
    updates, new = world.update(with_weights({"w": g}, weights), old, params)
    before, after = opened(old), opened(new)
    assert before[1].any()
    if collective == "all_gather":
        absent = weights == 0
        for a, b in zip(jax.tree.leaves(old.memory), jax.tree.leaves(new.memory), strict=True):
            assert np.asarray(a)[absent].tobytes() == np.asarray(b)[absent].tobytes()
    else:
        assert (before[1] != after[1]).any()
    seen = before.mean(axis=0) + np.average(g, axis=0, weights=weights)
    sent = np.asarray(updates["w"][0], np.float64) + after.mean(axis=0)
    grid = {"bfloat16": 2.0**-7, "int8": 1 / 127, "float8_e4m3fn": 2.0**-3}[dtype] * np.abs(after).max()
    # An owner that was absent is rounded twice.
    np.testing.assert_allclose(sent, seen, atol=2 * grid, rtol=0)


@slow
def test_an_absent_worker_may_go_on_sending_from_its_memory() -> None:
    """As one whose gradient is zero: the law holds, its residual gets smaller, and no memory is put aside."""

    def both(**options: Any) -> Any:
        tx = gc.topk_sgd(axis_name=AXIS, density=1 / 16, block=64, mask=True, collective="all_gather", dtype="float32")
        return environment("vmap", carried(gc.weighted(tx, axis_name=AXIS, **options)))

    params, rng = {"w": np.zeros((16, 64), np.float32)}, np.random.default_rng(0)
    first, second = rng.normal(size=(2, WORKERS, 16, 64)).astype(np.float32)
    weights = np.asarray([3, 0, 1, 2, 5, 0, 1, 4])
    second[weights == 0] = np.nan
    left = {}
    for keep in (True, False):
        world = both(keep_absent=keep)
        _, old = world.update(with_weights({"w": first}, [1] * 8), world.init(params), params)
        updates, new = world.update(with_weights({"w": second}, weights), old, params)
        before, after = (
            np.asarray(exchange_state(s).memory[0][0].value, np.float64).reshape(WORKERS, -1) for s in (old, new)
        )
        seen = before.mean(axis=0) + np.average(np.nan_to_num(second.reshape(WORKERS, -1)), axis=0, weights=weights)
        sent = np.asarray(updates["w"][0], np.float64).reshape(-1) + after.mean(axis=0)
        np.testing.assert_allclose(sent, seen, atol=1e-5, rtol=0)
        left[keep] = np.linalg.norm(after[1]) / np.linalg.norm(before[1])
    assert left[True] == 1 and left[False] < 0.95


@slow
def test_inside_a_hierarchy_the_weights_of_a_workers_devices_add_up() -> None:
    mesh = jax.make_mesh((4, 2), ("slices", "chips"), axis_types=(AxisType.Auto,) * 2)
    axes = ("slices", "chips")
    inside = gc.weighted(gc.dense(axis_name="slices"), axis_name="slices")
    tx = optax.chain(gc.hierarchical(inside, axis_name="slices", inner_axis_name="chips"), optax.sgd(1.0))
    params = {"w": np.zeros((6, 3), np.float32)}
    rng = np.random.default_rng(0)
    batch = {
        "g": rng.normal(size=(8, 6, 3)).astype(np.float32),
        "weight": np.asarray([1, 2, 0, 0, 3, 2, 4, 0], np.float32),
    }
    step = gc.make_train_step(
        lambda p, b: jnp.sum(p["w"] * b["g"][0]), tx, mesh, axis_name=axes, weight=lambda b: b["weight"]
    )
    new, _ = step(gc.init_state(params, tx, mesh, axis_name=axes), batch)
    of_workers = batch["g"].reshape(4, 2, 6, 3).mean(axis=1)
    want = np.average(of_workers, axis=0, weights=batch["weight"].reshape(4, 2).sum(axis=1))
    np.testing.assert_allclose(new.params["w"], -want, rtol=1e-6, atol=1e-6)
    for method in (gc.topk_sgd(axis_name="slices", density=0.1), gc.dense(axis_name="slices")):
        around = gc.weighted(gc.hierarchical(method, axis_name="slices", inner_axis_name="chips"), axis_name=axes)
        with pytest.raises(ValueError, match=r"put weighted inside, such as gc\.hierarchical"):
            gc.init_state({"w": np.zeros((64, 64), np.float32)}, around, mesh, axis_name=axes)


@slow
def test_in_plain_jit_the_weights_are_an_array() -> None:
    batch, union = padded_batch()
    mesh, params = mesh_of(AxisType.Auto), {"w": np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)}
    tx = gc.unreduced(optax.chain(gc.weighted(gc.dense(axis_name=AXIS), axis_name=AXIS), optax.sgd(0.1)), mesh)

    @jax.jit
    def step(params: Any, state: Any, batch: Any, weight: Any) -> Any:
        _, gradient = gc.local_value_and_grad(loss, axis_name=AXIS, mesh=mesh)(params, batch)
        updates, state = tx.update(gradient, state, params, weight=weight)
        return optax.apply_updates(params, updates), state

    weights = batch["real"].reshape(WORKERS, -1).sum(axis=1)
    new, _ = step(params, tx.init(params), batch, weights)
    wanted = jax.grad(loss)(params, union)
    np.testing.assert_allclose(new["w"], params["w"] - 0.1 * wanted["w"], rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"weight must be one number for each worker, \[8\], got \[\]"):
        tx.update(params, tx.init(params), params, weight=2.0)


def test_a_weight_that_comes_to_nobody_is_refused() -> None:
    """Such as where optax.contrib.split_real_and_imaginary is around the method: it passes no extra arguments on."""
    mesh, params = mesh_of(AxisType.Auto), {"w": np.ones((6, 3), np.float32)}
    batch, _ = padded_batch()
    inside = gc.weighted(gc.dense(axis_name=AXIS), axis_name=AXIS)
    for tx in (optax.contrib.split_real_and_imaginary(inside), optax.sgd(0.1)):
        state = gc.TrainState(np.zeros((), np.int32), params, tx.init(params))
        step = gc.make_train_step(loss, tx, mesh, weight=examples_of, donate=False)
        with pytest.raises(ValueError, match=r"weight= did not come to a gradcomp_jax\.weighted"):
            jax.eval_shape(step.lower, state, batch)
        plain = gc.unreduced(tx, mesh)
        gradient = jax.eval_shape(gc.local_value_and_grad(loss, axis_name=AXIS, mesh=mesh), params, batch)[1]
        with pytest.raises(ValueError, match=r"weight= did not come to a gradcomp_jax\.weighted"):
            jax.eval_shape(plain.update, gradient, state.opt_state, params, weight=np.ones(WORKERS, np.float32))


@slow
@pytest.mark.parametrize("method", ("dense", "terngrad"))
def test_a_weight_is_four_bytes_in_an_all_reduce(method: str) -> None:
    params = {"w": np.zeros((64, 64), np.float32)}
    gradient = {"w": np.zeros((WORKERS, 64, 64), np.float32)}
    make = getattr(gc, method)
    sent = []
    for tx, given in (
        (make(axis_name=AXIS), gradient),
        (carried(gc.weighted(make(axis_name=AXIS), axis_name=AXIS)), with_weights(gradient, np.ones(WORKERS))),
    ):
        world = environment("shard_map-auto-vma", tx)
        sent.append(gc.wire_bytes(world.jitted.lower(given, world.init(params), params).compile()).by("kind"))
    plain, weighted = ({kind: row.sent for kind, row in rows.items()} for rows in sent)
    added = {kind: size - plain.get(kind, 0) for kind, size in weighted.items() if size != plain.get(kind, 0)}
    assert added == {"all-reduce": 2 * 4 * (WORKERS - 1) // WORKERS}


def traced(tx: Any, weight: Any) -> None:
    params = {"w": np.zeros((64, 32), np.float32)}
    state = jax.make_jaxpr(tx.init, axis_env=[(AXIS, WORKERS)], return_shape=True)(params)[1]
    jax.make_jaxpr(lambda g, s, w: tx.update(g, s, g, weight=w), axis_env=[(AXIS, WORKERS)])(params, state, weight)


def sums_of_scalars(jaxpr: Any) -> int:
    """How many sums of one number a traced program has, in all its branches and loops."""
    count = 0
    for equation in jaxpr.eqns:
        count += equation.primitive.name.startswith("psum") and any(v.aval.size == 1 for v in equation.invars)
        bodies = [b for p in equation.params.values() for b in (p if isinstance(p, (tuple, list)) else [p])]
        count += sum(sums_of_scalars(b) for b in (getattr(b, "jaxpr", b) for b in bodies) if hasattr(b, "eqns"))
    return count


def selecting() -> Any:
    return gc.weighted(gc.topk_sgd(axis_name=AXIS, density=0.1), axis_name=AXIS)


AROUND = {
    "a chain": lambda: optax.chain(gc.local_clip(1.0, axis_name=AXIS), selecting(), optax.sgd(0.1)),
    "buckets outside": lambda: gc.bucketed(selecting(), bucket_bytes=1024),
    "buckets inside": lambda: gc.weighted(
        gc.bucketed(gc.topk_sgd(axis_name=AXIS, density=0.1), bucket_bytes=1024), axis_name=AXIS
    ),
    "rates": lambda: gc.rate_weighted(selecting(), lambda step: 0.1 / (1.0 + step.astype(jnp.float32))),
    "a loss scale": lambda: gc.dynamic_loss_scale(selecting()),
    "master weights": lambda: gc.master_weights(selecting()),
    "a mask": lambda: optax.masked(selecting(), {"w": True, "v": False}),
    "partitions": lambda: optax.multi_transform(
        {"a": selecting(), "b": gc.weighted(gc.dense(axis_name=AXIS), axis_name=AXIS)}, {"w": "a", "v": "b"}
    ),
    "accumulation": lambda: gc.accumulate(selecting(), axis_name=AXIS, every=2),
    "a delay": lambda: gc.delayed_average(selecting(), axis_name=AXIS, delay=2, compensate=False),
    "densities that move": lambda: gc.weighted(
        gc.density_schedule((0.1, 0.2), lambda step: 0.1 + 0.0 * step.astype(jnp.float32), axis_name=AXIS),
        axis_name=AXIS,
    ),
    "a policy": lambda: gc.weighted(
        gc.exchange(gc.by_path("w", gc.compressors.topk(0.1), otherwise="dense"), axis_name=AXIS), axis_name=AXIS
    ),
}


@pytest.mark.parametrize("around", AROUND)
def test_what_goes_around_hands_the_weight_on(around: str) -> None:
    """One scalar more is summed for each weighted exchange, and nobody refuses it."""
    tx, params = AROUND[around](), {"w": np.zeros((64, 32), np.float32), "v": np.zeros((48, 8), np.float32)}
    state = jax.make_jaxpr(tx.init, axis_env=[(AXIS, WORKERS)], return_shape=True)(params)[1]
    counts = []
    for given in ({}, {"weight": np.float32(2)}):
        run = jax.make_jaxpr(lambda g, s, extra: tx.update(g, s, g, **extra), axis_env=[(AXIS, WORKERS)])
        counts.append(sums_of_scalars(run(params, state, given).jaxpr))
    assert counts[1] - counts[0] == (2 if around == "partitions" else 1)


def test_what_cannot_be_weighted_is_refused() -> None:
    dense = gc.dense(axis_name=AXIS)
    weighted = gc.weighted(dense, axis_name=AXIS)
    for good in (np.float32(2), np.int32(3), np.ones(1, np.float32), np.ones((1, 1), np.float16)):
        traced(weighted, good)
    for bad in (np.ones(8), np.ones(0), np.zeros((), bool), np.complex64(1)):
        with pytest.raises(ValueError, match=r"weight must be one number on each worker.*, got"):
            traced(weighted, bad)
    with pytest.raises(ValueError, match=r"does not read weight=, .*: put gradcomp_jax\.weighted\(method"):
        traced(optax.chain(dense, optax.sgd(0.1)), np.float32(1))
    with pytest.raises(ValueError, match="there is no exchange in this transformation"):
        traced(gc.weighted(optax.sgd(0.1), axis_name=AXIS), np.float32(1))
    with pytest.raises(
        ValueError, match=r"weighted is over .* the exchange inside over .*: give both the same axis_name"
    ):
        traced(gc.weighted(dense, axis_name=None), np.float32(1))
    with pytest.raises(NameError, match="'chips' is not bound here: give weighted the axis_name of its method"):
        traced(gc.weighted(dense, axis_name="chips"), np.float32(1))
    policy = gc.by_path("w", "averaged", otherwise="dense")
    with pytest.raises(ValueError, match=r"come as the workers' mean .*: leave weighted out"):
        traced(gc.weighted(gc.exchange(policy, axis_name=AXIS), axis_name=AXIS), np.float32(1))


@slow
def test_reduced_gradients_are_refused_and_one_worker_needs_no_axis() -> None:
    mesh, params = mesh_of(AxisType.Auto), {"w": np.ones((4, 3), np.float32)}
    tx = gc.weighted(gc.dense(axis_name=AXIS), axis_name=AXIS)

    def worker(p: Any) -> Any:
        return tx.update(jax.tree.map(jnp.ones_like, p), tx.init(p), p, weight=1.0)[0]

    with pytest.raises(ValueError, match="the gradient 'w' is already reduced over 'data'"):
        jax.jit(jax.shard_map(worker, mesh=mesh, in_specs=jax.P(), out_specs=jax.P()))(params)
    alone = gc.weighted(gc.topk_sgd(axis_name=None, density=0.5, mask=True), axis_name=None)
    state = alone.init(params)
    for weight, moved in ((2.5, True), (0.0, False), (-1.0, False)):
        updates, after = alone.update(jax.tree.map(jnp.ones_like, params), state, params, weight=weight)
        assert bool(jnp.any(updates["w"] != 0)) == moved and int(after.skipped) == (not moved)
