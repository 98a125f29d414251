"""Narrow memories from run to run: checkpoints, another number of workers, sharded parameters."""

import dataclasses
import pathlib
from typing import Any

import chex
import jax
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax.memory.narrow import Narrow, is_narrow, values_of
from gradcomp_jax.training.checkpoint_record import compare_makers
from tests.conformance.environments import exchange_state, means_kept
from tests.training.test_checkpoint_record import PARAMS, one, state_of
from tests.transforms import test_reduce_scatter as sharded

DTYPES = ("bfloat16", "int8", "float8_e4m3fn")
MATRICES = {"a": np.zeros((33, 20), np.float32), "b": np.zeros((7, 40), np.float32)}


def is_mark(node: Any) -> bool:
    return isinstance(node, gc.PerDevice)


def is_kept(node: Any) -> bool:
    return is_mark(node) or is_narrow(node)


def wide(node: Any) -> Any:
    """What is kept in scales and values, as one array of float32."""
    mark = values_of(node)
    if not is_mark(mark):
        return node
    value = np.asarray(mark.value).astype(np.float32)
    if is_narrow(node):
        scale = np.asarray(node.scale.value)
        value = value * np.repeat(scale, value.shape[-1] // scale.shape[-1], axis=-1)
    return dataclasses.replace(mark, value=value)


def widened(state: Any) -> Any:
    return jax.tree.map(wide, state, is_leaf=is_kept)


def step_of(node: Any) -> float:
    """The largest step of a grid in what is kept."""
    value, mark = np.abs(wide(node).value).max(), values_of(node)
    if not is_narrow(node):
        return float(value * 2.0**-7)
    largest = np.asarray(node.scale.value).max()
    return float(largest if np.asarray(mark.value).dtype == np.int8 else max(value / 8, largest))


def filled(tx, workers: int) -> Any:
    """The exchange's state of so many workers, every value another, as shapes say; nothing is compiled."""
    shapes = jax.eval_shape(jax.vmap(lambda _: tx.init(MATRICES), axis_name="data"), np.zeros(workers))
    exchange = exchange_state(shapes)
    rng = np.random.default_rng(0)

    def fill(leaf):
        if not is_mark(leaf):
            return np.zeros(leaf.shape[1:], leaf.dtype)
        shape, dtype = leaf.value.shape, leaf.value.dtype
        drawn = rng.normal(size=(shape[0] * shape[1], *shape[2:]))
        # An integer's or a small float's grid; a scale is above zero.
        drawn = np.abs(drawn) + 0.1 if dtype == np.float32 else np.clip(40 * drawn, -127, 127)
        return dataclasses.replace(leaf, value=drawn.astype(dtype))

    return jax.tree.map(fill, exchange, is_leaf=is_mark)


@pytest.mark.parametrize("new", (1, 3, 16))
@pytest.mark.parametrize(("name", "dtype"), [("dgc", "int8"), ("topk_sgd", "bfloat16"), ("topk_sgd", "float8_e4m3fn")])
def test_the_mean_is_preserved_but_for_one_rounding(name: str, dtype: str, new: int) -> None:
    tx = getattr(gc, name)(axis_name="data", density=1 / 8, block=16, memory_dtype=dtype)
    before = filled(tx, 8)
    after = gc.resize_workers(before, old=8, new=new)
    fresh = filled(tx, new)
    assert jax.tree.structure(after) == jax.tree.structure(fresh)
    assert jax.tree.map(lambda x: (np.shape(x), x.dtype), after) == jax.tree.map(
        lambda x: (np.shape(x), x.dtype), fresh
    )
    nodes = [n for n in jax.tree.leaves(after.memory, is_leaf=is_kept) if values_of(n).kind == "worker"]
    # The memory's own rounding, and, where owners were left out, that of what they had.
    atol = (1 if new % 8 else 0) * max(map(step_of, nodes)) / new + 1e-5
    for want, got in zip(means_kept(widened(before), 8), means_kept(widened(after), new), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)
    if new == 16:
        # Repeated, not rounded.
        for a, b in zip(jax.tree.leaves(before.memory), jax.tree.leaves(after.memory), strict=True):
            np.testing.assert_array_equal(np.tile(a, (2,) + (1,) * (a.ndim - 1)), b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpoint_keeps_its_bits_and_its_dtype(dtype: str, tmp_path: pathlib.Path) -> None:
    state = state_of(one("dgc", memory_dtype=dtype))
    gc.save_checkpoint(tmp_path / "saved", state)
    restored = gc.restore_checkpoint(tmp_path / "saved", state_of(one("dgc", memory_dtype=dtype), 1))
    chex.assert_trees_all_equal(restored, state)
    assert jax.tree.map(lambda x: x.dtype, restored) == jax.tree.map(lambda x: x.dtype, state)
    sentence = rf"saved with dgc\(memory_dtype={dtype}\), .* into dgc\(memory_dtype=float32\)"
    with pytest.raises(ValueError, match=sentence):
        gc.restore_checkpoint(tmp_path / "saved", state_of(one("dgc"), 1))


def test_the_dtype_of_a_memory_of_ones_own_is_no_dtype_of_the_wire() -> None:
    code = gc.compressors.topk(0.01)
    saved, like = (
        jax.eval_shape(gc.exchange(code, axis_name=None, memory=gc.memory.residual(dtype=dtype)).init, PARAMS)
        for dtype in ("int8", "float32")
    )
    record = {"made_by": [[saved.made_by.name, dict(saved.made_by.options)]]}
    with pytest.raises(ValueError, match=r"exchange\(memory.dtype=int8\), .* into exchange\(memory.dtype=float32\)"):
        compare_makers(pathlib.Path("saved"), record, like)


def test_checkpoints_from_before_are_float32() -> None:
    states = {d: jax.eval_shape(one("topk_sgd", memory_dtype=d).init, PARAMS) for d in ("float32", "int8")}
    options = {k: v for k, v in states["float32"].made_by.options if k != "memory_dtype"}
    record = {"made_by": [["topk_sgd", options]]}
    compare_makers(pathlib.Path("saved"), record, states["float32"])
    with pytest.raises(ValueError, match=r"into topk_sgd\(memory_dtype=int8\)"):
        compare_makers(pathlib.Path("saved"), record, states["int8"])


@pytest.mark.slow
@pytest.mark.parametrize("new", (2,))
def test_sharded_parameters_with_another_number_of_workers(new: int, monkeypatch) -> None:
    """Rows and their scales are cut by owner alike."""
    monkeypatch.setitem(
        sharded.METHODS,
        "narrow",
        lambda collective: gc.topk_sgd(
            axis_name="data", density=1 / 32, block=64, collective=collective, memory_dtype="int8"
        ),
    )
    world, rng = sharded.World("narrow", workers=4), np.random.default_rng(5)
    state = world.init()
    for _ in range(3):
        _, state = world.update(sharded.draw(rng, 4), state)
    other = sharded.World("narrow", workers=new)
    resized, like = gc.resize_workers(state, old=4, new=new), other.init()
    assert jax.tree.structure(resized) == jax.tree.structure(like)
    assert jax.tree.map(np.shape, resized) == jax.tree.map(np.shape, like)
    memories = [exchange_state(s).memory[0] for s in (state, resized)]
    for before, after, k in zip(*memories, ("kernel", "matrix", "table"), strict=True):
        assert isinstance(before, Narrow)
        dim, shape = sharded.SPECS[k].index("data"), sharded.SHAPES[k]
        want, got = (sharded.whole(wide(m), shape, dim, n).mean(axis=0) for m, n in ((before, 4), (after, new)))
        assert np.abs(got - want).max() <= step_of(after) / new
    placed = jax.device_put(resized, gc.state_shardings(resized, other.mesh, axis_name="data"))
    updates, _ = other.update(sharded.draw(rng, new), placed)
    assert np.asarray(updates["matrix"]).any()
