"""The first of two phases alone: each worker gets its shard of the mean, for parameters that lie along the axis."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import gradcomp_jax as gc
from gradcomp_jax.collectives import ReduceScatter
from gradcomp_jax.per_device import is_per_device
from tests.conformance.environments import exchange_state
from tests.marks import slow_but

P = PartitionSpec
N = 4
SHAPES = {"bias": (7,), "kernel": (3, 3, 8, 20), "matrix": (40, 24), "table": (32, 16)}
SPECS = {"bias": P(), "kernel": P(None, None, "data"), "matrix": P(None, "data"), "table": P("data")}
METHODS = {
    "dense": lambda collective: gc.dense(axis_name="data", collective=collective),
    "dgc": lambda collective: gc.dgc(axis_name="data", density=1 / 32, block=64, collective=collective),
    "topk": lambda collective: gc.topk_sgd(axis_name="data", density=1 / 32, block=64, collective=collective),
    "stretches": lambda collective: gc.exchange(
        gc.compressors.topk(1 / 32, block=64), axis_name="data", collective=collective, view="rows"
    ),
    "stretches with momentum": lambda collective: gc.exchange(
        gc.compressors.topk(1 / 32, block=64),
        axis_name="data",
        memory=gc.memory.momentum_correction(0.9),
        collective=collective,
        view="rows",
    ),
    "random_k": lambda collective: gc.random_k(axis_name="data", density=1 / 32, block=64, collective=collective),
    "int8": lambda collective: gc.block_quantized(axis_name="data", block=64, collective=collective),
    "ef_sign": lambda collective: gc.ef_sign_sgd(axis_name="data", block=64, collective=collective),
    "terngrad": lambda collective: gc.terngrad(axis_name="data", collective=collective),
    "eden": lambda collective: gc.eden(axis_name="data", block=64, collective=collective),
    "ef21": lambda collective: gc.ef21(axis_name="data", density=1 / 32, block=64, collective=collective),
}
STRETCHES = ("stretches", "stretches with momentum")


def params():
    return {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}


def draw(rng, workers=N):
    return {name: rng.standard_normal((workers, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


class World:
    """Whole gradients, stacked by worker, in; updates as sharded as the parameters out."""

    def __init__(self, name, workers=N, specs=SPECS, collective=None):
        self.mesh = jax.make_mesh(
            (workers,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:workers]
        )
        self.specs = specs
        self.tx = METHODS[name](ReduceScatter(specs) if collective is None else collective)
        self.step = jax.jit(self._step)

    def init(self):
        return gc.init_state(params(), self.tx, self.mesh, axis_name="data", param_specs=self.specs).opt_state

    def _step(self, gradient, state):
        def local(gradient, state, values):
            return self.tx.update(jax.tree.map(lambda g: g[0], gradient), state, values)

        specs = gc.state_specs(state, axis_name="data")
        mapped = jax.shard_map(
            local, mesh=self.mesh, in_specs=(P("data"), specs, self.specs), out_specs=(self.specs, specs)
        )
        return mapped(gradient, state, params())

    def update(self, gradient, state):
        return self.step(jax.device_put(gradient, NamedSharding(self.mesh, P("data"))), state)


def whole(leaf, shape, dim, workers=N):
    """A worker's rows, cut by owner, as the tensors they are of: ``[workers, *shape]``."""
    value = np.asarray(leaf.value, np.float64).reshape(workers, workers, -1)
    entries = value[..., : int(np.prod(shape)) // workers].reshape(workers, shape[dim], *np.delete(shape, dim))
    return np.moveaxis(entries, 1, dim + 1)


@pytest.mark.parametrize("name", slow_but(("topk", "int8"), ["topk", "random_k", "int8", "ef_sign"]))
def test_updates_and_residuals_add_up_to_the_gradients(name: str) -> None:
    world, rng = World(name), np.random.default_rng(0)
    state, seen, moved = world.init(), {}, {}
    for _ in range(6):
        gradient = draw(rng)
        updates, state = world.update(gradient, state)
        for k in SHAPES:
            seen[k] = seen.get(k, 0) + gradient[k].astype(np.float64).mean(axis=0)
            moved[k] = moved.get(k, 0) + np.asarray(updates[k], np.float64)
    segments = exchange_state(state).memory[0]
    for leaf, k in zip([p for p in segments if is_per_device(p)], ("kernel", "matrix", "table"), strict=True):
        dim = SPECS[k].index("data")
        kept = whole(leaf, SHAPES[k], dim).mean(axis=0)
        assert np.abs(kept).max() > 1e-3
        np.testing.assert_allclose(moved[k] + kept, seen[k], atol=1e-4, err_msg=k)
    np.testing.assert_allclose(moved["bias"], seen["bias"], atol=1e-5)


@pytest.mark.parametrize("name", slow_but(("int8", STRETCHES[1]), ["dense", *STRETCHES, "int8", "ef_sign"]))
def test_it_is_a_gather_of_which_each_worker_keeps_its_shard(name: str) -> None:
    """Where blocks do not cross the borders between owners, the rows are the same, and so is every bit."""
    specs = {**SPECS, "kernel": P(), "matrix": P()}
    world, gathered = World(name, specs=specs), World(name, specs=P(), collective="all_gather")
    rng = np.random.default_rng(1)
    state, other = world.init(), gathered.init()
    for _ in range(4):
        gradient = draw(rng)
        updates, state = world.update(gradient, state)
        expected, other = gathered.update(gradient, other)
        np.testing.assert_array_equal(updates["table"], expected["table"])
        assert updates["table"].sharding.shard_shape((32, 16)) == (8, 16)


@pytest.mark.parametrize("name", slow_but(("dgc",), ("dgc", "int8", "terngrad", "eden")))
def test_a_bad_entry_skips_the_step_everywhere(name: str) -> None:
    world, rng = World(name), np.random.default_rng(2)
    _, state = world.update(draw(rng), world.init())
    bad = draw(rng)
    bad["matrix"][1, 5, 23] = -np.inf
    updates, after = world.update(bad, state)
    assert not any(np.asarray(u).any() for u in updates.values())
    inner, before = exchange_state(after), exchange_state(state)
    assert int(inner.skipped) == int(before.skipped) + 1
    for a, b in zip(jax.tree.leaves(inner.memory), jax.tree.leaves(before.memory), strict=True):
        np.testing.assert_array_equal(a, b)
    updates, _ = world.update(draw(rng), after)
    assert all(np.isfinite(u).all() and np.asarray(u).any() for u in updates.values())


def test_there_is_no_downlink() -> None:
    world = World("int8")
    compiled = world.step.lower(
        jax.device_put(draw(np.random.default_rng(3)), NamedSharding(world.mesh, P("data"))), world.init()
    ).compile()
    sent = gc.wire_bytes(compiled).by("kind")
    rows = sum(-(-int(np.prod(SHAPES[k])) // N // 64) for k in ("kernel", "matrix", "table"))
    assert sent["all-to-all"].sent == (N - 1) * rows * (64 + 4)
    # The bias, which everybody wants, and the word that says whether the step counts.
    assert set(sent) == {"all-to-all", "all-reduce"}
    assert sent["all-reduce"].sent <= 2 * 4 * 8


@pytest.mark.parametrize("name", slow_but(("dgc",), ("dgc", "ef21")))
def test_fully_sharded_training(name: str) -> None:
    """Through init_state and make_train_step: parameters and the optimizer's state are sharded, and stay so."""
    mesh, rng = jax.make_mesh((N,), ("data",), devices=jax.devices()[:N]), np.random.default_rng(4)
    specs = {"w": P(None, "data"), "b": P()}
    rate = {"ef21": 0.05, "random_k": 0.05}.get(name, 0.4)
    tx = optax.chain(METHODS[name](ReduceScatter(specs)), optax.sgd(rate, momentum=0.5 if name != "dgc" else 0.0))
    target = rng.standard_normal((64, 32)).astype(np.float32)
    state = gc.init_state(
        {"w": np.zeros((64, 32), np.float32), "b": np.zeros((32,), np.float32)}, tx, mesh, param_specs=specs
    )
    step = gc.make_train_step(lambda p, b: jnp.mean((b[0] @ p["w"] + p["b"] - b[1]) ** 2), tx, mesh, param_specs=specs)
    losses = []
    for _ in range(120):
        x = rng.standard_normal((64, 64)).astype(np.float32)
        state, metrics = step(state, jax.device_put((x, x @ target), gc.data_sharding(mesh)))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]
    assert step._cache_size() == 1
    for leaf in jax.tree.leaves(state):
        if leaf.shape == (64, 32):
            assert leaf.sharding.shard_shape(leaf.shape) == (64, 8)


@pytest.mark.parametrize(("old", "new"), slow_but([(4, 2)], [(4, 2), (2, 4)]))
def test_another_number_of_workers(old: int, new: int, tmp_path) -> None:
    """Rows are cut anew for the new owners; the mean over the workers of what each tensor waits for is what it was."""
    world, rng = World("topk", workers=old), np.random.default_rng(5)
    state = world.init()
    for _ in range(3):
        _, state = world.update(draw(rng, old), state)
    resized = gc.resize_workers(state, old=old, new=new)
    like = World("topk", workers=new).init()
    assert jax.tree.structure(resized) == jax.tree.structure(like)
    gc.save_checkpoint(tmp_path / "saved", state)
    restored = gc.restore_checkpoint(tmp_path / "saved", like)
    for a, b in zip(jax.tree.leaves(resized), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(a, b)
    memories = [exchange_state(s).memory[0] for s in (state, resized)]
    for before, after, k in zip(*memories, ("kernel", "matrix", "table"), strict=True):
        dim = SPECS[k].index("data")
        want = whole(before, SHAPES[k], dim, old).mean(axis=0)
        np.testing.assert_allclose(whole(after, SHAPES[k], dim, new).mean(axis=0), want, rtol=1e-6, atol=1e-9)
    placed = jax.device_put(resized, gc.state_shardings(resized, World("topk", workers=new).mesh, axis_name="data"))
    updates, _ = World("topk", workers=new).update(draw(rng, new), placed)
    assert np.asarray(updates["matrix"]).any()


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dimension 1 of 'matrix', of shape .* does not divide among 4"):
        jax.eval_shape(
            jax.shard_map(
                lambda g: METHODS["int8"](ReduceScatter(P(None, "data"))).update(g, None)[0],
                mesh=World("int8").mesh,
                in_specs=P("data"),
                out_specs=P(None, "data"),
            ),
            {"matrix": np.ones((N, 10), np.float32)},
        )
    with pytest.raises(ValueError, match="view='tree' otherwise"):
        gc.gradient_dropping(axis_name="data", collective=ReduceScatter(SPECS))
    with pytest.raises(ValueError, match=r"must be added, ReduceScatter.* does not"):
        gc.exchange(gc.compressors.low_rank(2, (8, 8)), axis_name="data", collective=ReduceScatter(SPECS))
    with pytest.raises(NameError, match="'data' is not bound here"):
        METHODS["int8"](ReduceScatter(SPECS)).init(params())
