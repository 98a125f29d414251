"""Parameters that lie along several model axes: each device exchanges its shard, whatever the order of the axes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc
from tests.conformance.environments import exchange_state

AXES = ("fsdp", "tensor")
SPECS = {
    "bias": P(),
    "both": P("fsdp", "tensor"),
    "joined": P(("fsdp", "tensor")),
    "row": P("fsdp", None),
    "turned": P(None, ("tensor", "fsdp")),
}
SHAPES = {"bias": (6,), "both": (32, 64), "joined": (32, 64), "row": (16, 64), "turned": (16, 64)}
ROWS = {"bias": 0, "both": 8, "joined": 8, "row": 4, "turned": 4}
"""Blocks of 64 in a device's shard, or in its part of one."""


def mesh_of(*sizes: int, axes: tuple[str, ...] = ("data", *AXES)) -> jax.sharding.Mesh:
    return jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * len(sizes))


def int8() -> optax.GradientTransformationExtraArgs:
    return gc.block_quantized(axis_name="data", block=64)


def sharded(method: Any, axes: Any = AXES, specs: Any = SPECS) -> optax.GradientTransformationExtraArgs:
    return gc.model_parallel(method, axis_name="data", model_axis_name=axes, param_specs=specs)


def params(mesh: Any) -> Any:
    return {k: jax.device_put(np.ones(SHAPES[k], np.float32), NamedSharding(mesh, s)) for k, s in SPECS.items()}


def draw() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=(2, *shape)).astype(np.float32) for k, shape in SHAPES.items()}


def gradients(mesh: Any) -> Any:
    """Each worker's own, as ``local_value_and_grad(mesh=)`` returns them."""
    places = {k: NamedSharding(mesh, P("data", *s)) for k, s in SPECS.items()}
    return {k: gc.PerDevice(jax.device_put(g, places[k]), 1, lifted=True) for k, g in draw().items()}


def lowered(tx: Any, mesh: Any) -> Any:
    """The update of a state that stays where it is, and the state's shapes."""
    reduced = gc.unreduced(tx, mesh)
    shapes = jax.eval_shape(reduced.init, params(mesh))
    places = gc.state_shardings(shapes, mesh)
    state = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, places)
    of_params = {k: NamedSharding(mesh, s) for k, s in SPECS.items()}
    return jax.jit(reduced.update, out_shardings=(of_params, places)).lower(gradients(mesh), state, params(mesh)), state


def test_a_mean_is_the_mean() -> None:
    mesh = mesh_of(2, 2, 2)
    tx = gc.unreduced(sharded(gc.dense(axis_name="data")), mesh)
    updates, _ = jax.jit(tx.update)(gradients(mesh), tx.init(params(mesh)), params(mesh))
    for name, gradient in draw().items():
        np.testing.assert_allclose(updates[name], gradient.mean(0), rtol=1e-6, atol=1e-7)


def test_each_device_sends_its_shard_whatever_the_order_of_the_axes() -> None:
    mesh = mesh_of(2, 2, 2)
    program, state = lowered(sharded(int8()), mesh)
    assert lowered(sharded(int8(), AXES[::-1]), mesh)[0].as_text() == program.as_text()
    sent = gc.wire_bytes(program.compile(), mesh=mesh).by("axis")
    rows = sum(ROWS.values())
    # Half of the payload each way; the bias and a verdict beside it.
    assert rows * (64 + 4) <= sent[("data",)].sent <= rows * (64 + 4) + 32
    # The updates of what is whole along an axis, and nothing of the others.
    assert sent[("tensor",)].sent == SHAPES["row"][0] * SHAPES["row"][1] * 4 // 2 // 2
    assert sent[AXES].sent <= 8 * 4
    assert ("fsdp",) not in sent
    (residuals, *_), *_ = exchange_state(state).memory
    assert residuals.shards == 4
    assert residuals.value.sharding.spec == P(("data", *AXES))


@pytest.mark.slow
def test_manual_axes_give_the_same() -> None:
    mesh = mesh_of(2, 2, 2)
    tx, every = sharded(int8()), ("data", *AXES)
    reduced = gc.unreduced(tx, mesh)
    state = reduced.init(params(mesh))
    expected, _ = jax.jit(reduced.update)(gradients(mesh), state, params(mesh))

    def local(gradient: Any, state: Any, params: Any) -> Any:
        return tx.update(jax.tree.map(lambda g: g[0], gradient), state, params)

    specs = gc.state_specs(state, axis_name=every)
    in_specs = ({k: P("data", *s) for k, s in SPECS.items()}, specs, SPECS)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=(SPECS, specs))
    updates, _ = jax.jit(mapped)(draw(), state, params(mesh))
    for name in SHAPES:
        np.testing.assert_array_equal(updates[name], expected[name])


def made_by(mesh: Any, axes: Any, specs: Any) -> Any:
    params = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    return jax.eval_shape(gc.unreduced(sharded(int8(), axes, specs), mesh).init, params).made_by


def test_axes_of_one_device_may_be_left_out() -> None:
    """Trainers such as MaxText name many axes in every spec, of which a run uses few."""
    mesh = mesh_of(2, 4, 1, axes=("data", *AXES))
    wanted = made_by(mesh, "fsdp", {"w": P("fsdp")})
    assert dict(wanted.options) == {"devices": "4", "sharded_dims": "(0)"}
    assert made_by(mesh, "fsdp", {"w": P(("fsdp", "tensor"), "tensor")}) == wanted
    assert made_by(mesh, AXES, {"w": P("fsdp", "tensor")}) == wanted


def test_a_checkpoint_tells_divisions_of_as_many_devices() -> None:
    specs = {"w": P("fsdp", "tensor")}
    whole, turned = {"w": P(None, "tensor")}, {"w": P("tensor", "fsdp")}
    mesh = mesh_of(1, 4, 2)
    found = [made_by(mesh, AXES, s) for s in (specs, whole, turned)] + [made_by(mesh_of(1, 2, 4), AXES, specs)]
    assert len(set(found)) == 4


def test_an_axis_that_is_not_named_is_refused() -> None:
    mesh = mesh_of(2, 2, 2)
    tx = gc.unreduced(sharded(int8(), "tensor"), mesh)
    state = jax.eval_shape(gc.unreduced(sharded(int8()), mesh).init, params(mesh))
    for call in (
        lambda: tx.init(params(mesh)),
        lambda: jax.eval_shape(tx.update, gradients(mesh), state, params(mesh)),
    ):
        with pytest.raises(ValueError, match=r"lay tensors along 'fsdp'.*gather.*model_axis_name=\('fsdp', 'tensor'\)"):
            call()


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match=r"in one, as in model_axis_name=\('fsdp', 'tensor'\)"):
        sharded(sharded(int8(), "tensor"), "fsdp")
    with pytest.raises(ValueError, match=r"must differ, got 'data' and \('fsdp', 'data'\)"):
        sharded(int8(), ("fsdp", "data"))
    mesh = mesh_of(2, 2, 2)
    with pytest.raises(ValueError, match=r"along \('data', 'tensor'\), of workers and of a model"):
        gc.unreduced(sharded(int8(), AXES, {**SPECS, "row": P(("data", "tensor"))}), mesh).init(params(mesh))
