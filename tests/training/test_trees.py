"""Trees of parameters as users have them: leaves that are None, that are integers, that are frozen; trees of other classes."""

import dataclasses
import pathlib
from typing import Any

import flax.core
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.replicas.fragments import cut
from tests.training.problem import mesh_of, on

N = 8
WEIGHTS = np.random.default_rng(0).standard_normal((24, 16)).astype(np.float32)
BIAS = np.zeros(16, np.float32)
BATCH = np.random.default_rng(1).standard_normal((16, 24)).astype(np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """As an Equinox module without bias, filtered for its arrays, has it: fields that are not arrays are None."""

    weights: Any
    bias: Any
    scale: Any = None


TREES = {
    "none": {"weights": WEIGHTS, "bias": BIAS, "none": None, "nested": {"none": None}},
    "dataclass": Layer(WEIGHTS, BIAS),
    "nnx": flax.nnx.State({"weights": flax.nnx.Param(WEIGHTS), "bias": flax.nnx.Param(BIAS)}),
}


def parts_of(params: Any) -> tuple[Any, Any]:
    """The weights and the bias, wherever they are."""
    bias, weights = sorted((x for x in jax.tree.leaves(params) if jnp.size(x) >= 16), key=jnp.size)
    return weights, bias


def loss(params: Any, batch: Any) -> Any:
    weights, bias = parts_of(params)
    return jnp.mean(jnp.square(jnp.tanh(batch @ weights + bias) - 0.5))


def exchange() -> optax.GradientTransformation:
    return gc.dgc(axis_name="data", density=0.25, block=16)


def trained(
    params: Any, tx: optax.GradientTransformation, *, steps: int = 3, state: Any = None
) -> tuple[list[float], Any]:
    mesh = mesh_of(N)
    state = gc.init_state(params, tx, mesh) if state is None else state
    step, losses = gc.make_train_step(loss, tx, mesh), []
    for _ in range(steps):
        state, metrics = step(state, on(mesh, BATCH))
        losses.append(float(metrics["loss"]))
    return losses, state


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return trained({"weights": WEIGHTS, "bias": BIAS}, optax.chain(exchange(), optax.sgd(0.5)))[0]


@pytest.mark.parametrize("name", TREES)
def test_any_tree_trains_alike(name: str, expected: list[float]) -> None:
    losses, state = trained(TREES[name], optax.chain(exchange(), optax.sgd(0.5)))
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert jax.tree.structure(state.params) == jax.tree.structure(TREES[name])


@pytest.mark.slow
def test_leaves_that_are_none_or_without_entries_are_saved_and_resized(tmp_path: pathlib.Path) -> None:
    tree, tx = {**TREES["none"], "empty": np.zeros((0, 4), np.float32)}, optax.chain(exchange(), optax.sgd(0.5))
    _, state = trained(tree, tx)
    gc.save_checkpoint(tmp_path / "saved", state)
    for workers in (N // 2, N):
        restored = gc.restore_checkpoint(tmp_path / "saved", gc.init_state(tree, tx, mesh_of(workers)))
        for ours, theirs in zip(jax.tree.leaves(restored.params), jax.tree.leaves(state.params), strict=True):
            np.testing.assert_array_equal(ours, theirs)
            assert ours.shape == theirs.shape
    assert restored.params["empty"].shape == (0, 4)


@pytest.mark.parametrize("sizes", [(32, 0), (0, 32), (0, 0), (5, 0, 0), ()])
def test_parts_of_a_tree_with_leaves_without_entries(sizes: tuple[int, ...]) -> None:
    for parts in range(1, max(2, len(sizes) + 1)):
        found = cut([np.zeros(size) for size in sizes], parts)
        assert len(found) == parts and sorted(i for part in found for i in part) == list(range(len(sizes)))
        assert not sizes or all(found)


def test_a_tree_of_nothing_but_empty_leaves_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"all 2 parameters are without entries, such as one of shape \(0, 4\): there is"
    ):
        trained([np.zeros((0, 4), np.float32), np.zeros(0, np.float32)], optax.chain(exchange(), optax.sgd(0.5)))


FREEZE = {
    "masked": lambda frozen: optax.chain(
        optax.masked(exchange(), jax.tree.map(lambda f: not f, frozen)),
        optax.masked(gc.set_to_zero(), frozen),
        optax.sgd(0.5),
    ),
    "multi_transform": lambda frozen: optax.multi_transform(
        {"trained": optax.chain(exchange(), optax.sgd(0.5)), "frozen": gc.set_to_zero()},
        jax.tree.map(lambda f: "frozen" if f else "trained", frozen),
    ),
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("how", FREEZE)
def test_frozen_and_integer_leaves_stay_as_they_are(how: str, expected: list[float]) -> None:
    params = {"weights": WEIGHTS, "bias": BIAS, "table": np.arange(3), "frozen": np.ones(4, np.float32), "none": None}
    frozen = {"weights": False, "bias": False, "table": True, "frozen": True, "none": None}
    losses, state = trained(params, FREEZE[how](frozen))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    for name in ("table", "frozen"):
        np.testing.assert_array_equal(state.params[name], params[name])
        assert state.params[name].dtype == jnp.asarray(params[name]).dtype


def test_an_integer_leaf_in_an_exchange_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"keep other leaves out with optax.multi_transform and gradcomp_jax.set_to_zero\(\)"
    ):
        trained(
            {"weights": WEIGHTS, "bias": BIAS, "table": np.arange(3)}, optax.chain(exchange(), optax.sgd(0.5)), steps=1
        )


def test_a_leaf_that_no_exchange_averages_is_refused() -> None:
    params = {"weights": WEIGHTS, "bias": BIAS}
    only_weights = optax.chain(optax.masked(exchange(), {"weights": True, "bias": False}), optax.sgd(0.5))
    for tx in (only_weights, optax.sgd(0.5)):
        with pytest.raises(ValueError, match=r"(?s)the update of 'bias' differs by worker over 'data'.*set_to_zero"):
            trained(params, tx, steps=1)


def test_zeros_of_a_sharded_parameter_are_a_shard() -> None:
    updates, _ = gc.set_to_zero().update({"w": jnp.ones((32, 2), jnp.bfloat16)}, (), {"w": jnp.ones((8, 2))})
    assert (updates["w"].shape, updates["w"].dtype) == ((8, 2), jnp.bfloat16)
