"""Where each part of a train state lives."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc
from tests.training.problem import mesh_of, params


def marked(leaf) -> bool:
    return isinstance(leaf, gc.PerDevice)


def tree():
    return {
        "residual": gc.PerDevice(jnp.zeros((6, 5)), 3),
        "server": gc.PerDevice(jnp.zeros((4, 5)), 4, "shard"),
        "count": jnp.zeros((), jnp.int32),
        "nested": (jnp.zeros((2, 2)), ()),
    }


def test_specs() -> None:
    specs = gc.state_specs(tree(), axis_name="data")
    assert specs == {
        "residual": gc.PerDevice(P("data"), 3),
        "server": gc.PerDevice(P("data"), 4, "shard"),
        "count": P(),
        "nested": (P(), ()),
    }
    both = gc.state_specs(tree(), axis_name=("slow", "fast"))
    assert both["residual"].value == P(("slow", "fast"))
    # From shapes alone.
    assert gc.state_specs(jax.eval_shape(tree), axis_name="data") == specs


def test_axes() -> None:
    axes = gc.state_axes(tree())
    assert axes == {
        "residual": gc.PerDevice(0, 3),
        "server": gc.PerDevice(0, 4, "shard"),
        "count": None,
        "nested": (None, ()),
    }


def test_shardings() -> None:
    mesh = mesh_of(2)
    shardings = gc.state_shardings(tree(), mesh, axis_name="data")
    assert shardings["residual"].value == NamedSharding(mesh, P("data"))
    assert shardings["count"] == shardings["nested"][0] == NamedSharding(mesh, P())
    placed = jax.device_put(tree(), shardings)
    assert placed["residual"].value.addressable_shards[1].data.shape == (3, 5)


@pytest.mark.parametrize("explicit", (False, True))
def test_init_state_places_everything(explicit: bool) -> None:
    mesh = mesh_of(4, explicit=explicit)
    tx = optax.chain(
        gc.exchange(
            gc.compressors.block_quantized(block=16), axis_name="data", collective=gc.collectives.TwoPhase("server")
        ),
        optax.trace(0.9),
    )
    state = gc.init_state(params(), tx, mesh)
    assert int(state.step) == 0
    assert state.step.dtype == jnp.int32
    for leaf in jax.tree.leaves((state.params, state.step, state.opt_state[1])):
        assert leaf.sharding.is_fully_replicated
        assert len(leaf.sharding.device_set) == 4
    chex.assert_trees_all_equal(state.params, params())
    found = [leaf for leaf in jax.tree.leaves(state.opt_state, is_leaf=marked) if marked(leaf)]
    assert {leaf.kind for leaf in found} == {"worker", "shard"}
    for leaf in found:
        per_worker = leaf.rows if leaf.kind == "worker" else -(-leaf.rows // 4)
        assert leaf.value.shape in ((4 * per_worker, 16), (4,)), "rows of blocks, or how much is held back"
        assert leaf.value.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), leaf.value.ndim)
        assert not np.any(leaf.value)
    # No two leaves share a buffer: all of them are donated.
    pointers = [a.addressable_shards[0].data.unsafe_buffer_pointer() for a in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("where", ["host", "device", "mesh"])
def test_init_state_copies_the_parameters(where: str) -> None:
    """The state is donated: on no device it may have memory of the caller's, who goes on with what was given."""
    mesh = mesh_of(2)
    own: np.ndarray | jax.Array = np.arange(64.0, dtype=np.float32)
    if where != "host":
        own = jax.device_put(own, jax.devices()[0] if where == "device" else NamedSharding(mesh, P()))
    state = gc.init_state({"w": own}, optax.chain(gc.terngrad(axis_name="data"), optax.sgd(0.1)), mesh)
    taken = [shard.data.unsafe_buffer_pointer() for shard in state.params["w"].addressable_shards]
    if where == "host":
        own[0] = 5
    else:
        assert not {shard.data.unsafe_buffer_pointer() for shard in own.addressable_shards} & set(taken)
    np.testing.assert_array_equal(state.params["w"], np.arange(64.0))


def test_a_chain_without_an_exchange_has_a_state_too() -> None:
    state = gc.init_state(params(), optax.sgd(0.1, momentum=0.9), mesh_of(2))
    assert not any(marked(leaf) for leaf in jax.tree.leaves(state, is_leaf=marked))


def test_an_unknown_axis_is_refused() -> None:
    for build in (
        lambda: gc.init_state(params(), optax.sgd(0.1), mesh_of(2), axis_name="dat"),
        lambda: gc.make_train_step(lambda p, b: 0.0, optax.sgd(0.1), mesh_of(2), axis_name="dat"),
    ):
        with pytest.raises(ValueError, match="axis_name must be one of 'data', got 'dat'; did you mean 'data'"):
            build()
    with pytest.raises(ValueError, match="axis_name must be one of 'data', got 'fast'"):
        gc.init_state(params(), optax.sgd(0.1), mesh_of(2), axis_name=("data", "fast"))
