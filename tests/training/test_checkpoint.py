"""Save, restore and go on: as if nothing had happened, and on another number of workers."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import gradcomp_jax as gc
from tests.conformance.environments import rows_of_owners
from tests.marks import slow_but
from tests.training.problem import batch, loss, mesh_of, on, params

CHAINS = {
    "dgc": lambda: optax.chain(gc.dgc(axis_name="data", density=0.125, block=16), optax.sgd(0.05)),
    "terngrad": lambda: optax.chain(gc.terngrad(axis_name="data", bucket_size=40), optax.sgd(0.02, momentum=0.5)),
    "int8": lambda: optax.chain(
        gc.exchange(
            gc.compressors.block_quantized(block=16), axis_name="data", collective=gc.collectives.TwoPhase("server")
        ),
        optax.sgd(0.05),
    ),
}


def marked(leaf) -> bool:
    return isinstance(leaf, gc.PerDevice)


def per_device(state) -> list[gc.PerDevice]:
    return [leaf for leaf in jax.tree.leaves(state, is_leaf=marked) if marked(leaf)]


def common(state) -> list[np.ndarray]:
    return [leaf for leaf in jax.tree.leaves(state, is_leaf=marked) if not marked(leaf)]


@functools.cache
def program(name: str, workers: int):
    """A mesh, a transformation and its train step, compiled once for all tests."""
    mesh, tx = mesh_of(workers), CHAINS[name]()
    return mesh, tx, gc.make_train_step(loss, tx, mesh, donate=False)


def fresh(name: str, workers: int):
    mesh, tx, _ = program(name, workers)
    return gc.init_state(params(), tx, mesh)


def run(name: str, workers: int, state, seeds):
    mesh, _, step = program(name, workers)
    for seed in seeds:
        state, metrics = step(state, on(mesh, batch(seed)))
    assert np.isfinite(metrics["loss"])
    return state


def filled(name: str, workers: int):
    """A state in which every per-device value is another."""
    mesh, _, _ = program(name, workers)
    rng = np.random.default_rng(0)

    def fill(leaf):
        if not marked(leaf):
            return leaf
        value = np.zeros(leaf.value.shape, np.float32)
        used = leaf.rows if leaf.kind == "shard" and len(value) > workers else len(value)
        used = 0 if leaf.returns and workers < leaf.returns.least else used
        value[:used] = rng.normal(size=(used, *value.shape[1:])) / 8
        return dataclasses.replace(leaf, value=value)

    state = fresh(name, workers)
    made = jax.tree.map(fill, state, is_leaf=marked)
    return jax.device_put(made, gc.state_shardings(made, mesh, axis_name="data"))


@pytest.mark.parametrize("name", slow_but(("dgc",), CHAINS))
def test_restored_training_is_uninterrupted_training(name: str, tmp_path) -> None:
    halfway = run(name, 8, fresh(name, 8), (0, 1))
    gc.save_checkpoint(tmp_path / "saved", halfway)
    restored = gc.restore_checkpoint(tmp_path / "saved", fresh(name, 8))
    assert jax.tree.structure(restored) == jax.tree.structure(halfway)
    assert jax.tree.map(lambda a: a.sharding, restored) == jax.tree.map(lambda a: a.sharding, halfway)
    chex.assert_trees_all_equal(restored, halfway)
    # The memories are among what was saved, and hold something, each worker its own.
    for leaf in per_device(restored):
        if leaf.kind == "worker":
            shards = [np.asarray(shard.data) for shard in leaf.value.addressable_shards]
            assert not all(np.array_equal(shard, shards[0]) for shard in shards)
        assert np.any(leaf.value)
    assert bool(per_device(restored)) == (name != "terngrad")
    whole, resumed = (run(name, 8, state, (2, 3)) for state in (halfway, restored))
    chex.assert_trees_all_equal(resumed, whole)
    # It matters what is restored: a fresh memory goes elsewhere.
    forgetful = fresh(name, 8)._replace(params=restored.params)
    assert not np.array_equal(run(name, 8, forgetful, (2, 3)).params["w"], whole.params["w"])


@pytest.mark.parametrize(("old", "new"), slow_but(((2, 8),), [(8, 3), (2, 8), (3, 8)]))
@pytest.mark.parametrize("name", slow_but(("dgc", "int8"), CHAINS))
def test_another_number_of_workers(name: str, old: int, new: int, tmp_path) -> None:
    saved = filled(name, old)
    gc.save_checkpoint(tmp_path / "saved", saved)
    like = fresh(name, new)
    restored = gc.restore_checkpoint(tmp_path / "saved", like)
    assert jax.tree.structure(restored) == jax.tree.structure(like)
    assert jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), restored) == jax.tree.map(
        lambda a: (a.shape, a.dtype, a.sharding), like
    )
    for before, after in zip(common(saved), common(restored), strict=True):
        np.testing.assert_array_equal(before, after)
    for before, after in zip(per_device(saved), per_device(restored), strict=True):
        if before.kind == "shard":
            held, kept = (rows_of_owners(x.value, n)[: x.rows] for x, n in ((after, new), (before, old)))
            if before.returns and old < before.returns.least:
                # No owners before: they begin with nothing.
                kept = np.zeros_like(held)
            np.testing.assert_array_equal(held, kept)
            continue
        want, got = (
            np.asarray(leaf.value, np.float64).reshape(workers, leaf.rows, -1).mean(axis=0)
            for leaf, workers in ((before, old), (after, new))
        )
        # One rounding of one worker's float32 rows, or none at all.
        limit = 0 if new % old == 0 else np.abs(after.value[: after.rows]) * 2.0**-24 / new * 1.01
        assert (np.abs(got - want) <= limit + 2.0**-50).all()
    if new == 8:
        assert int(run(name, 8, restored, (0,)).step) == 1


@pytest.mark.slow
def test_typed_keys_of_the_workers_come_back_as_such(tmp_path) -> None:
    """Each worker's own, and where there are more workers those of the first ones again."""

    def keys(workers: int, seed: int):
        state = {"noise": gc.PerDevice(jax.random.split(jax.random.key(seed, impl="rbg"), workers), 1)}
        return jax.device_put(state, gc.state_shardings(state, mesh_of(workers), axis_name="data"))

    saved = keys(4, 0)
    gc.save_checkpoint(tmp_path / "saved", saved)
    for workers in (4, 3, 8):
        restored = gc.restore_checkpoint(tmp_path / "saved", keys(workers, 1))
        assert jax.typeof(restored["noise"].value).dtype == jax.typeof(saved["noise"].value).dtype
        found, data = (np.asarray(jax.random.key_data(state["noise"].value)) for state in (restored, saved))
        np.testing.assert_array_equal(found, data[np.arange(workers) % 4])
    same = jax.device_put(keys(4, 0)["noise"].value, NamedSharding(mesh_of(4), PartitionSpec()))
    gc.save_checkpoint(
        tmp_path / "same", {"noise": gc.PerDevice(same, 4)}
    )  # copies, by their sharding: they are compared


def test_training_goes_on_with_fewer_workers(tmp_path) -> None:
    gc.save_checkpoint(tmp_path / "saved", run("int8", 8, fresh("int8", 8), (0, 1)))
    resumed = gc.restore_checkpoint(tmp_path / "saved", fresh("int8", 3))
    assert int(run("int8", 3, resumed, (2, 3)).step) == 4


def test_owners_residual_alone_finds_its_new_owners(tmp_path) -> None:
    """Without a memory at the workers."""
    tx = gc.exchange(
        gc.compressors.block_quantized(block=16, stochastic=True),
        axis_name="data",
        memory=gc.memory.none(),
        collective=gc.collectives.TwoPhase("server"),
    )
    saved = gc.init_state(params(), tx, mesh_of(8))
    (server,) = (leaf for leaf in per_device(saved) if leaf.kind == "shard")
    shape = server.value.shape
    numbers = np.zeros(shape, np.float32)
    numbers[: server.rows] = 1 + np.arange(server.rows, dtype=np.float32)[:, None]
    value = numbers.reshape(-1, 8, shape[-1]).swapaxes(0, 1).reshape(shape)
    saved = jax.tree.map(
        lambda leaf: dataclasses.replace(leaf, value=value) if marked(leaf) and leaf.kind == "shard" else leaf,
        saved,
        is_leaf=marked,
    )
    gc.save_checkpoint(tmp_path / "saved", saved)
    restored = gc.restore_checkpoint(tmp_path / "saved", gc.init_state(params(), tx, mesh_of(3)))
    (moved,) = (leaf for leaf in per_device(restored) if leaf.kind == "shard")
    assert moved.value.shape[0] != value.shape[0]
    found = rows_of_owners(moved.value, 3)
    np.testing.assert_array_equal(found[: moved.rows], numbers[: server.rows])
    assert not np.any(found[moved.rows :])


def test_no_checkpoint(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint at .*nowhere.*save_checkpoint"):
        gc.restore_checkpoint(tmp_path / "nowhere", fresh("dgc", 2))


def test_an_earlier_checkpoint_is_not_overwritten_unasked(tmp_path) -> None:
    first, second = ({"x": np.full(3, v, np.float32)} for v in (1, 2))
    gc.save_checkpoint(tmp_path / "saved", first)
    with pytest.raises(ValueError, match="exist"):
        gc.save_checkpoint(tmp_path / "saved", second)
    with pytest.raises(ValueError, match="gs://bucket/run is a URL"):
        gc.save_checkpoint("gs://bucket/run", second)
    with pytest.raises(ValueError, match="gs://bucket/run is a URL"):
        gc.restore_checkpoint("gs://bucket/run", second)
    like = jax.device_put(first, jax.devices()[0])
    np.testing.assert_array_equal(gc.restore_checkpoint(tmp_path / "saved", like)["x"], first["x"])
    gc.save_checkpoint(tmp_path / "saved", second, overwrite=True)
    np.testing.assert_array_equal(gc.restore_checkpoint(tmp_path / "saved", like)["x"], second["x"])


def wider() -> dict[str, np.ndarray]:
    return {**params(), "w": np.ones((12, 16), np.float32)}


def deeper() -> dict[str, np.ndarray]:
    return {**params(), "u": np.ones((4, 4), np.float32)}


MISMATCHES = {
    "wider": (wider, CHAINS["dgc"], "of another model"),
    "deeper": (deeper, CHAINS["dgc"], "of another model or optimizer: it lacks"),
    "method": (params, CHAINS["terngrad"], r"saved with dgc\(\), and is to be restored into terngrad\(\)"),
    "optimizer": (params, lambda: optax.chain(CHAINS["dgc"](), optax.trace(0.9)), "of another model or optimizer"),
    "block": (
        params,
        lambda: optax.chain(gc.dgc(axis_name="data", density=0.125, block=8), optax.sgd(0.05)),
        r"saved with dgc\(block=16\), and is to be restored into dgc\(block=8\)",
    ),
}


@pytest.mark.parametrize("workers", (2, 3))
@pytest.mark.parametrize("what", MISMATCHES)
def test_a_checkpoint_of_something_else(what: str, workers: int, tmp_path) -> None:
    gc.save_checkpoint(tmp_path / "saved", fresh("dgc", 2))
    other, chain, sentence = MISMATCHES[what]
    like = gc.init_state(other(), chain(), mesh_of(workers))
    with pytest.raises(ValueError, match=sentence):
        gc.restore_checkpoint(tmp_path / "saved", like)


def test_damage_is_found_with_another_number_of_workers(tmp_path) -> None:
    gc.save_checkpoint(tmp_path / "saved", filled("dgc", 2))
    largest = max((tmp_path / "saved").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    for workers in (2, 3):
        with pytest.raises(ValueError, match=r"saved is damaged .*: go back to an earlier checkpoint"):
            gc.restore_checkpoint(tmp_path / "saved", fresh("dgc", workers))


def test_a_python_number_is_restored_into_an_array_that_holds_it(tmp_path) -> None:
    numbers = {"step": 7, "rate": 0.1, "on": True}
    gc.save_checkpoint(tmp_path / "saved", numbers)
    arrays = jax.tree.map(jax.numpy.asarray, {"step": 0, "rate": 0.0, "on": False})
    again = gc.restore_checkpoint(tmp_path / "saved", arrays)
    assert jax.tree.map(lambda x: x.dtype, again) == jax.tree.map(lambda x: x.dtype, arrays)
    assert (int(again["step"]), float(again["rate"]), bool(again["on"])) == (7, np.float32(0.1), True)
    assert gc.restore_checkpoint(tmp_path / "saved", {"step": 0, "rate": 0.0, "on": False}) == numbers
    gc.save_checkpoint(tmp_path / "large", {"step": 2**40})
    with pytest.raises(ValueError, match=r"checkpoint's step is int64\[\], the state's int32\[\]"):
        gc.restore_checkpoint(tmp_path / "large", {"step": jax.numpy.int32(0)})


@pytest.mark.parametrize(
    ("state", "sentence"),
    [({"name": "a"}, r"\['name'\] is a str: a checkpoint holds arrays and numbers"), ({}, "the state has no arrays")],
)
def test_what_cannot_be_saved_is_named(state, sentence: str, tmp_path) -> None:
    with pytest.raises(ValueError, match=sentence):
        gc.save_checkpoint(tmp_path / "saved", state)
    assert not any(tmp_path.iterdir())


def test_another_dtype(tmp_path) -> None:
    saved = jax.device_put({"x": np.ones(3, np.float32)}, jax.devices()[0])
    gc.save_checkpoint(tmp_path / "saved", saved)
    like = jax.device_put({"x": np.ones(3, jax.numpy.bfloat16)}, jax.devices()[0])
    with pytest.raises(ValueError, match=r"checkpoint's x is float32\[3\], the state's bfloat16\[3\]"):
        gc.restore_checkpoint(tmp_path / "saved", like)
