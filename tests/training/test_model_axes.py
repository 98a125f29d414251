"""Plain jit on a mesh of workers and model axes: parameters, and what has their shapes, lie along the model axes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc
from gradcomp_jax import _specs

pytestmark = pytest.mark.standard_promotion

SPECS = {"bias": P(), "down": P("tensor", None), "up": P(None, "tensor")}
SHAPES = {"bias": (16,), "down": (64, 16), "up": (16, 64)}


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def params(mesh: Any) -> Any:
    rng = np.random.default_rng(0)
    made = {name: rng.normal(size=shape, scale=0.1).astype(np.float32) for name, shape in SHAPES.items()}
    return jax.device_put(made, places(mesh))


def places(mesh: Any) -> Any:
    return {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}


def batch(mesh: Any) -> Any:
    x = np.random.default_rng(1).normal(size=(16, 16)).astype(np.float32)
    return jax.device_put((x, np.sin(x)), gc.data_sharding(mesh))


def loss(params: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"] - y) ** 2)


def method() -> optax.GradientTransformationExtraArgs:
    inner = gc.block_quantized(axis_name="data", block=64)
    return gc.model_parallel(inner, axis_name="data", model_axis_name="tensor", param_specs=SPECS)


def bytes_of_step(update: Any, opt_state: Any, mesh: Any) -> tuple[int, int]:
    """Bytes along both axes of a step whose states stay where they are, as trainers pin them."""
    value_and_grad = gc.local_value_and_grad(loss, axis_name="data", mesh=mesh)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        _, gradient = value_and_grad(params, batch)
        updates, opt_state = update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    pinned = places(mesh), jax.tree.map(lambda x: x.sharding, opt_state)
    compiled = jax.jit(step, out_shardings=pinned).lower(params(mesh), opt_state, batch(mesh)).compile()
    sent = gc.wire_bytes(compiled, mesh=mesh).by("axis")
    return sent[("data",)].sent, sent[("tensor",)].sent


def test_a_chain_sends_what_its_method_alone_sends(mesh: jax.sharding.Mesh) -> None:
    """Replicated moments would be gathered along the model axis in every step."""
    chain = gc.unreduced(optax.chain(method(), optax.adam(1e-3)), mesh)
    alone, adam = gc.unreduced(method(), mesh), optax.adam(1e-3)
    opt_state = chain.init(params(mesh))
    moments = opt_state[1][0]
    for name, place in places(mesh).items():
        for moment in (moments.mu[name], moments.nu[name]):
            assert moment.sharding.is_equivalent_to(place, moment.ndim)

    def update(gradient: Any, states: Any, params: Any) -> Any:
        averaged, kept = alone.update(gradient, states[0], params)
        updates, moments = adam.update(averaged, states[1], params)
        return updates, (kept, moments)

    by_itself = bytes_of_step(update, (alone.init(params(mesh)), opt_state[1]), mesh)
    assert bytes_of_step(chain.update, opt_state, mesh) == by_itself
    # What is reduced for the loss along the model axis, and the update of the bias, which is whole on all devices.
    assert by_itself[1] < 64 * 16 * 4


def test_shardings_of_a_state_are_where_init_puts_it(mesh: jax.sharding.Mesh) -> None:
    """The residuals of shards lie along the model axis: ``P("data")`` would gather them."""
    state = gc.init_state(params(mesh), optax.chain(method(), optax.adam(1e-3)), mesh, param_specs=SPECS)
    for value, place in zip(
        jax.tree.leaves(state), jax.tree.leaves(gc.state_shardings(state, mesh, param_specs=SPECS)), strict=True
    ):
        assert value.sharding.is_equivalent_to(place, value.ndim)


@pytest.mark.parametrize("known", ("specs", "constraint"))
def test_init_in_a_program(known: str, mesh: jax.sharding.Mesh) -> None:
    tx = gc.unreduced(optax.adam(1e-3), mesh, param_specs=SPECS if known == "specs" else None)

    def init(params: Any) -> Any:
        return tx.init(jax.lax.with_sharding_constraint(params, places(mesh)) if known == "constraint" else params)

    found = jax.jit(init).lower(params(mesh)).compile().output_shardings[0].mu
    assert all(place.is_equivalent_to(found[name], 2) for name, place in places(mesh).items())


def test_one_array_of_parameters() -> None:
    state = gc.training.TrainState(jnp.int32(0), np.ones((4, 4)), (np.ones((4, 4)), np.ones(4)))
    specs = gc.state_specs(state, param_specs=P("tensor"))
    assert specs.params == P("tensor") and specs.opt_state == (P("tensor"), P())


def variables(leaves: Any, **metadata: Any) -> nnx.State:
    wrapped = {name: {"kernel": nnx.Param(leaf, **metadata)} for name, leaf in leaves.items()}
    return nnx.State(wrapped)


def plain(leaves: Any) -> Any:
    return {name: {"kernel": leaf} for name, leaf in leaves.items()}


FORMS = {
    "variables": variables,
    "variables with metadata": lambda leaves: variables(leaves, layer="dense"),
    "plain": plain,
    "a state of plain leaves": lambda leaves: nnx.State(plain(leaves)),
    "a prefix": lambda leaves: leaves,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("named", (False, True), ids=("specs", "shardings"))
def test_specs_of_nnx_parameters(form: str, named: bool, mesh: jax.sharding.Mesh) -> None:
    given = FORMS[form](places(mesh) if named else SPECS)
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    for tree in (variables(shapes), plain(shapes)):
        assert _specs.by_leaf(given, tree) == [SPECS[name] for name in sorted(SPECS)]
        assert jax.tree.structure(_specs.like(given, tree)) == jax.tree.structure(tree)


def test_specs_of_other_names_or_no_specs_are_refused(mesh: jax.sharding.Mesh) -> None:
    tree = variables({name: np.ones(shape) for name, shape in SHAPES.items()})
    more = plain({**SPECS, "gate": P()})
    fewer = plain({"bias": P(), "down": P()})
    for specs in (more, fewer, plain({**SPECS, "up": "tensor"})):
        with pytest.raises(ValueError, match="param_specs must be a tree"):
            _specs.by_leaf(specs, tree)


def test_nnx_state_is_trained(mesh: jax.sharding.Mesh) -> None:
    tree = variables(params(mesh))
    shardings = jax.tree.map(lambda x: x.sharding, tree)
    tx = gc.model_parallel(
        gc.dense(axis_name="data"), axis_name="data", model_axis_name="tensor", param_specs=shardings
    )
    chain = optax.chain(tx, optax.adam(1e-2))
    state = gc.init_state(tree, chain, mesh, param_specs=shardings)
    step = gc.make_train_step(
        lambda p, b: loss({name: p[name]["kernel"][...] for name in SHAPES}, b), chain, mesh, param_specs=shardings
    )
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch(mesh))
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0]
    found = state.params["up"]["kernel"][...].sharding
    assert found.is_equivalent_to(places(mesh)["up"], 2)
