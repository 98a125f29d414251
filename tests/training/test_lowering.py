"""Programs lowered from shapes are the ones that run."""

import jax
import jax.numpy as jnp
import optax
import pytest

import gradcomp_jax as gc
from benchmarks.compiled.programs import trace_step

AXES = ("slices", "chips")
SHAPES = {"w": jax.ShapeDtypeStruct((64, 128), jnp.float32), "b": jax.ShapeDtypeStruct((128,), jnp.float32)}
BATCH = (jax.ShapeDtypeStruct((32, 64), jnp.float32), jax.ShapeDtypeStruct((32, 128), jnp.float32))


def loss(params, batch):
    return jnp.mean((batch[0] @ params["w"] + params["b"] - batch[1]) ** 2)


def subject(hierarchical: bool):
    """A transformation, its mesh and its axes."""
    sizes, axes = ((2, 4), AXES) if hierarchical else ((8,), AXES[:1])
    mesh = jax.make_mesh(sizes, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))
    tx = gc.dgc(axis_name="slices", density=1 / 64, block=64)
    if hierarchical:
        tx = gc.hierarchical(tx, axis_name="slices", inner_axis_name="chips")
    return optax.chain(tx, optax.sgd(0.1)), mesh, axes if hierarchical else "slices"


@pytest.mark.parametrize("hierarchical", [False, True])
def test_a_traced_step_is_the_step_that_runs(hierarchical: bool) -> None:
    tx, mesh, axis_name = subject(hierarchical)
    traced = trace_step(loss, SHAPES, BATCH, tx, mesh, axis_name=axis_name).lower().compile()
    state = gc.init_state(jax.tree.map(lambda s: jnp.ones(s.shape), SHAPES), tx, mesh, axis_name=axis_name)
    batch = jax.tree.map(lambda s: jnp.ones(s.shape), BATCH)
    batch = jax.device_put(batch, gc.data_sharding(mesh, axis_name=axis_name))
    step = gc.make_train_step(loss, tx, mesh, axis_name=axis_name)
    assert gc.wire_bytes(traced, mesh=mesh) == gc.wire_bytes(step.lower(state, batch).compile(), mesh=mesh)
    _, metrics = traced(state, batch)
    assert float(metrics["loss"]) == 64.0**2


@pytest.mark.parametrize("hierarchical", [False, True])
def test_an_update_is_lowered_whatever_its_state_depends_on(hierarchical: bool) -> None:
    """The state of ``hierarchical`` can only be shaped inside its axes."""
    tx, mesh, axis_name = subject(hierarchical)
    report = gc.wire_bytes(gc.lower_update(SHAPES, tx, mesh, axis_name=axis_name).compile(), mesh=mesh)
    # Of eight workers each owns a shard of the rows; two send each other what they have.
    kinds = {row.kind for row in report.rows if row.axis == ("slices",)}
    assert kinds >= ({"all-gather"} if hierarchical else {"all-to-all", "all-gather"})


@pytest.mark.slow
def test_an_axis_that_the_compiler_has_stays_its_own() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"w": jax.P(None, "model"), "b": jax.P()}
    tx = gc.model_parallel(
        gc.block_quantized(axis_name="data"), axis_name="data", model_axis_name="model", param_specs=specs
    )
    compiled = gc.lower_update({"w": jnp.ones((64, 128)), "b": jnp.ones(128)}, tx, mesh).compile()
    sent = sum(row.sent_bytes for row in gc.wire_bytes(compiled, mesh=mesh).rows if row.axis == ("data",))
    # A quarter of the matrix in int8, to an owner and back, and scales and a vector in float32.
    assert 64 * 128 // 4 < sent < 64 * 128 // 2


def test_an_axis_that_the_mesh_does_not_have_is_refused() -> None:
    tx, mesh, _ = subject(False)
    with pytest.raises(ValueError, match="axis_name must be"):
        trace_step(loss, SHAPES, BATCH, tx, mesh, axis_name="model")
    with pytest.raises(ValueError, match="axis_name must be"):
        gc.lower_update(SHAPES, tx, mesh, axis_name="model")


def test_an_update_that_nobody_averages_is_refused() -> None:
    _, mesh, _ = subject(False)
    with pytest.raises(ValueError, match="differs by worker over 'slices', because no exchange averages its gradient"):
        gc.lower_update(SHAPES, optax.sgd(0.1), mesh, axis_name="slices")
    with pytest.raises(NameError, match=r"the workers lie along 'slices', .*: give both the same axis_name"):
        gc.lower_update(SHAPES, gc.dense(axis_name="chips"), mesh, axis_name="slices")


def test_replicas_exchange_what_an_outer_step_sends(mesh8):
    """The step of the exchange sends the outer gradient and one number of good workers; other steps send nothing."""
    params = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    tx = optax.chain(optax.sgd(0.1), gc.diloco(gc.dense(axis_name="data"), axis_name="data", every=4))
    compiled = gc.lower_update(params, tx, mesh8, replicas=True).compile()
    assert (
        gc.wire_bytes(compiled, branch=-1).sent - gc.wire_bytes(compiled, branch=0).sent
        == 2 * 7 / 8 * (64 * 64 + 1) * 4
    )
