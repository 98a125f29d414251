"""The record of what methods send, against their programs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

import gradcomp_jax as gc
from gradcomp_jax.methods import METHODS
from gradcomp_jax.planning import MODELS, traffic
from gradcomp_jax.planning.predict import _shares

# A few layers of different kinds: the record is of one matrix, and padding and small tensors must not spoil it.
SHAPES = ((3, 3, 128, 256), (256,), (2048, 1000), (1000,), (512, 2048), (64, 3))
PARAMS = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES]


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("name", METHODS)
def test_the_record_is_what_programs_send(name: str, workers: int) -> None:
    """Of the matrix itself to six figures: who changes a payload writes the record anew (benchmarks/planner.py --record)."""
    fresh = traffic.make_record([name], [workers])[name]
    kept = traffic.recorded()[name]
    assert kept["workers"][str(workers)] == fresh["workers"][str(workers)] and kept["rank"] == fresh["rank"]


@pytest.mark.parametrize("name", METHODS)
def test_it_holds_for_other_tensors(name: str) -> None:
    workers = 8
    exact = traffic.read(METHODS[name].build, PARAMS, workers)
    found = traffic.look_up(name, SHAPES, workers)
    assert found.sent == pytest.approx(exact.sent, rel=0.05)
    assert found.state == pytest.approx(exact.state, rel=0.05, abs=4096)
    assert sum(c.launches for c in found.crossings) == sum(c.launches for c in exact.crossings)


@pytest.mark.parametrize("workers", [3, 6, 24])
def test_between_numbers_of_workers(workers: int) -> None:
    """TernGrad's bits back grow in steps with N: it may be one step off."""
    for name in ("dense", "terngrad", "block_quantized", "demo", "powersgd"):
        exact = traffic.read(METHODS[name].build, PARAMS, workers)
        tolerance = 0.15 if name == "terngrad" else 0.05
        assert traffic.look_up(name, SHAPES, workers).sent == pytest.approx(exact.sent, rel=tolerance), name


def test_what_goes_dense_is_counted() -> None:
    """Vectors cross as float32: with a payload, or in a sum of their own where there is none."""
    (only,) = traffic.look_up("terngrad", ((1000,), (10,)), 4).crossings
    assert only == ("all-reduce", 1, 2 * 3 / 4 * 4 * 1010)
    large = traffic.look_up("dgc", ((1024, 1024), (2**19,)), 4).crossings
    assert [c.kind for c in large] == ["all-to-all", "all-gather", "all-reduce"]


def test_one_worker_sends_nothing_and_there_is_a_most() -> None:
    assert traffic.look_up("dgc", SHAPES, 1).sent == 0 == traffic.read(METHODS["dgc"].build, PARAMS, 1).sent
    with pytest.raises(ValueError, match="workers must be at most 1024 for the record, got 2048"):
        traffic.look_up("dgc", SHAPES, 2048)
    with pytest.raises(ValueError, match="did you mean 'terngrad'"):
        traffic.look_up("terngard", SHAPES, 4)


def test_models_of_hundreds_of_tensors_are_quick_to_look_up() -> None:
    shapes = tuple(leaf.shape for leaf in MODELS["llama-8b"]().values())
    found = traffic.look_up("block_quantized", shapes, 64)
    values = sum(leaf.size for leaf in MODELS["llama-8b"]().values())
    assert found.sent == pytest.approx(2 * 63 / 64 * values * 65 / 64, rel=0.02)


@pytest.mark.parametrize("name", ["dense_bf16", "terngrad", "dgc", "block_quantized", "powersgd", "ef_sign_sgd"])
def test_a_nodes_devices_send_their_shares(name: str) -> None:
    """Between 8 nodes of 4 devices, each device sends what the record has for a quarter of every tensor's rows."""
    nodes, per_node = 8, 4
    tx = gc.hierarchical(METHODS[name].build(axis_name="nodes"), axis_name="nodes", inner_axis_name="devices")
    mesh = AbstractMesh((nodes, per_node), ("nodes", "devices"), axis_types=(AxisType.Auto,) * 2)

    def update(stacked, params):
        return tx.update(jax.tree.map(lambda g: g[0], stacked), tx.init(params), params)[0]

    by_worker = jax.P(("nodes", "devices"))
    mapped = jax.shard_map(update, mesh=mesh, in_specs=(by_worker, jax.P()), out_specs=jax.P())
    stacked = [jax.ShapeDtypeStruct((nodes * per_node, *p.shape), p.dtype) for p in PARAMS]
    lowered = jax.jit(mapped).trace(stacked, PARAMS).lower(lowering_platforms=("cpu",))
    between = gc.wire_bytes(lowered.as_text(dialect="hlo"), branch=-1).by("group_size")[nodes]
    assert traffic.look_up(name, _shares(SHAPES, per_node), nodes).sent == pytest.approx(between.sent, rel=0.05)
