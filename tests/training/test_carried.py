"""A checkpoint goes on with another density or collective: what memories and owners held is held, whoever holds it now."""

import json
import pathlib
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.memory.narrow import is_narrow
from gradcomp_jax.training.checkpoint_record import FILE
from gradcomp_jax.training.resize import wide
from tests.conformance.environments import means_kept
from tests.training.problem import mesh_of, on

SHAPE = (40, 30)
GATHERED = {"collective": "all_gather"}
SERVER = {"collective": gc.collectives.TwoPhase("server")}


def topk(**options):
    return gc.topk_sgd(axis_name="data", **{"density": 0.05, **options})


def dgc(**options):
    return gc.dgc(axis_name="data", **{"density": 0.05, **options})


def coded(**options):
    return gc.exchange(gc.compressors.block_quantized(block=16), axis_name="data", **options)


def loss(params, batch):
    """Its gradient is the batch's mean, whatever the parameters."""
    return sum(jnp.mean(jnp.sum(params[k] * batch[k], axis=tuple(range(1, batch[k].ndim)))) for k in params)


def batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"w": rng.normal(size=(8, *SHAPE)).astype(np.float32), "v": rng.normal(size=(8, 7, 70)).astype(np.float32)}


def fresh(method, workers: int):
    params = {"w": np.zeros(SHAPE, np.float32), "v": np.zeros((7, 70), np.float32)}
    return gc.init_state(params, optax.chain(method, optax.sgd(1.0)), mesh_of(workers))


def steps(method, workers: int, state, seeds):
    mesh = mesh_of(workers)
    step = gc.make_train_step(loss, optax.chain(method, optax.sgd(1.0)), mesh)
    for seed in seeds:
        state, _ = step(state, on(mesh, batch(seed)))
    return state


def exchange_of(state) -> gc.ExchangeState:
    (found,) = gc.per_device.nodes_within(state, lambda node: isinstance(node, gc.ExchangeState))
    return found


def kept(state, workers: int) -> dict[str, np.ndarray]:
    """Of each tensor, in the order of its entries, what workers and owners hold of its mean."""
    exchange = exchange_of(state)
    opened = jax.tree.map(
        lambda x: wide(x) if is_narrow(x) else x, (exchange.memory, exchange.server), is_leaf=is_narrow
    )
    means = means_kept(exchange._replace(memory=opened[0], server=opened[1]), workers)
    sizes = {"v": 490, "w": 1200}
    assert not any(mean[0, size:].any() for mean, size in zip(means, sizes.values(), strict=True))
    return {name: mean[0, :size] for (name, size), mean in zip(sizes.items(), means, strict=True)}


def seen(seeds) -> dict[str, np.ndarray]:
    return {k: sum(batch(seed)[k].astype(np.float64).mean(axis=0) for seed in seeds) for k in batch(0)}


def through(tmp_path: pathlib.Path, state, method, workers: int):
    path = tmp_path / f"saved-{len(list(tmp_path.iterdir()))}"
    gc.save_checkpoint(path, state)
    with pytest.warns(UserWarning, match="and goes on with"):
        return gc.restore_checkpoint(path, fresh(method, workers))


CHANGES = {
    "owners to none": (topk(), topk(**GATHERED)),
    "none to owners": (topk(**GATHERED), topk()),
    "a larger block": (topk(), topk(density=0.0005, **GATHERED)),
    "a larger block with owners": (topk(density=0.0005), topk()),
    "dgc": (dgc(), dgc(**GATHERED)),
    "dgc of a larger block": (dgc(**GATHERED), dgc(density=0.0005)),
    "owners always": (coded(**SERVER), coded(**GATHERED)),
    "owners always from many": (topk(**SERVER), topk()),
    "bfloat16": (topk(memory_dtype="bfloat16"), topk(memory_dtype="bfloat16", **GATHERED)),
    "int8": (topk(memory_dtype="int8"), topk(memory_dtype="int8", density=0.0005)),
}
WITHOUT_OWNERS = ("none to owners", "dgc of a larger block")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "workers"), [(name, (8, 4)[i % 2]) for i, name in enumerate(CHANGES)])
def test_what_was_held_is_held(name: str, workers: int, tmp_path) -> None:
    """Updates and what is kept are all gradients, at the end, where one more change has left memories alone."""
    before, after = CHANGES[name]
    state = steps(before, 8, fresh(before, 8), (0, 1, 2))
    held = exchange_of(state)
    restored = through(tmp_path, state, after, workers)
    assert jax.tree.structure(restored) == jax.tree.structure(fresh(after, workers))
    assert int(exchange_of(restored).step) == 3
    np.testing.assert_array_equal(restored.params["w"], state.params["w"])
    if "dgc" in name and workers == 8:
        for old, new in zip(held.memory[0], exchange_of(restored).memory[0], strict=True):
            # Each worker's velocity is its own, as it was.
            a, b = (np.asarray(m.velocity.value).reshape(8, -1) for m in (old, new))
            size = min(a.shape[1], b.shape[1])
            np.testing.assert_array_equal(a[:, :size], b[:, :size])
    assert any(np.any(x) for x in jax.tree.leaves(held.server)) == (name not in WITHOUT_OWNERS)
    coarse = {"int8": 0.1, "bfloat16": 0.05}.get(name, 3e-6)
    for k, value in kept(restored, workers).items():
        np.testing.assert_allclose(value, kept(state, 8)[k], atol=coarse)
    if "dgc" in name:
        # A velocity goes on between two steps, so gradients are not all that is seen.
        return
    restored = steps(after, workers, restored, (3,))
    for k, value in kept(restored, workers).items():
        total = seen((0, 1, 2, 3))[k].reshape(-1)
        np.testing.assert_allclose(value - np.asarray(restored.params[k]).reshape(-1), total, atol=coarse)


@pytest.mark.slow
def test_owners_of_an_earlier_version_are_refused_with_the_way_out(tmp_path) -> None:
    """It does not say whose rows they hold; where they stay what they are, or none were there, nothing need be said."""
    state = steps(topk(), 8, fresh(topk(), 8), (0,))
    gc.save_checkpoint(tmp_path / "saved", state)
    for file in (tmp_path / "saved").rglob(FILE):
        metadata = json.loads(file.read_bytes())
        kept = metadata["custom_metadata"]["gradcomp_jax"]
        del kept["record"]["owners"]
        kept["crc32"] = zlib.crc32(json.dumps(kept["record"], sort_keys=True).encode())
        file.write_text(json.dumps(metadata))
    with pytest.warns(UserWarning, match="goes on"), pytest.raises(ValueError, match="options that it was saved with"):
        gc.restore_checkpoint(tmp_path / "saved", fresh(topk(**GATHERED), 8))
    same = gc.restore_checkpoint(tmp_path / "saved", fresh(topk(), 8))
    np.testing.assert_array_equal(exchange_of(same).server[0].value, exchange_of(state).server[0].value)


@pytest.mark.slow
def test_tensors_that_are_compressed_no_more_are_named(tmp_path) -> None:
    gc.save_checkpoint(tmp_path / "saved", fresh(topk(), 2))
    with (
        pytest.warns(UserWarning, match="goes on"),
        pytest.raises(ValueError, match=r"memories where this state has none, .* pass the same mask"),
    ):
        gc.restore_checkpoint(tmp_path / "saved", fresh(topk(density=1.0), 2))
