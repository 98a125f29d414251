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
from tests.marks import slow_but

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


@pytest.mark.parametrize("known", slow_but(("specs",), ("specs", "constraint")))
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


@pytest.mark.slow
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


def pinned_loss(mesh: Any) -> Any:
    """As trainers write it: activations lie along the model axis, by constraints on the mesh."""

    def at(x: Any, *spec: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    @jax.checkpoint
    def forward(params: Any, x: Any) -> Any:
        hidden = at(jnp.tanh(x @ params["up"]), None, "tensor")
        return at(hidden @ params["down"] + params["bias"], None, None)

    return lambda params, batch: jnp.mean((forward(params, batch[0]) - batch[1]) ** 2)


def test_a_loss_with_constraints_on_the_mesh(mesh: jax.sharding.Mesh) -> None:
    """``shard_map`` refuses it. By ``vmap`` its gradients are those of a loss without, and no byte crosses before."""
    tx = gc.unreduced(optax.chain(method(), optax.sgd(0.1)), mesh)
    opt_state, arguments = tx.init(params(mesh)), (params(mesh), batch(mesh))
    by_vmap = gc.local_value_and_grad(pinned_loss(mesh), axis_name="data", mesh=mesh, by="vmap")
    plain = jax.jit(gc.local_value_and_grad(loss, axis_name="data", mesh=mesh))
    with pytest.raises(ValueError, match=r"whose axis 'data' is mapped here: take .*by='vmap'"):
        jax.eval_shape(gc.local_value_and_grad(pinned_loss(mesh), axis_name="data", mesh=mesh), *arguments)

    gradient = jax.jit(lambda params, batch: by_vmap(params, batch)[1]).lower(*arguments).compile()
    assert ("data",) not in gc.wire_bytes(gradient, mesh=mesh).by("axis")
    expected_value, expected = plain(*arguments)
    found = gradient(*arguments)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.sharding.spec[0] == "data"
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)

    def step(value_and_grad: Any) -> Any:
        def of(params: Any, opt_state: Any, batch: Any) -> Any:
            value, gradient = value_and_grad(params, batch)
            updates, opt_state = tx.update(gradient, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        return jax.jit(of).lower(arguments[0], opt_state, arguments[1]).compile()

    ours, theirs = step(by_vmap), step(plain)
    sent, wanted = (gc.wire_bytes(program, mesh=mesh).by("axis") for program in (ours, theirs))
    assert sent[("data",)].sent == wanted[("data",)].sent
    assert sent[("tensor",)].sent <= wanted[("tensor",)].sent
    np.testing.assert_allclose(ours(arguments[0], opt_state, arguments[1])[2], expected_value, rtol=1e-6)


@pytest.mark.slow
def test_vmap_finds_what_shard_map_finds(mesh: jax.sharding.Mesh) -> None:
    """Auxiliary output of each kind, keys, micro-batches, weights, and a parameter without a gradient."""

    def noisy(params: Any, batch: Any, key: Any, *, scale: Any) -> Any:
        x, y = batch
        x = x + scale * jax.random.normal(key, x.shape)
        aux = {"rows": x[:, 0], "count": jnp.int32(len(x)), "most": x.max()}
        return loss(params, (x, y)), aux

    tree = {**params(mesh), "steps": np.int32(3)}
    found = {}
    for by in ("shard_map", "vmap"):
        value_and_grad = gc.local_value_and_grad(
            noisy,
            axis_name="data",
            mesh=mesh,
            by=by,
            has_aux=True,
            aux={"rows": "examples", "count": "sum", "most": "max"},
            accumulate=2,
            weight=lambda batch, key: (batch[0][:, 0] > 0).sum(),
        )
        found[by] = jax.jit(value_and_grad)(tree, batch(mesh), jax.random.key(5), scale=np.float32(0.1))
    assert jax.tree.structure(found["vmap"]) == jax.tree.structure(found["shard_map"])
    for ours, theirs in zip(jax.tree.leaves(found["vmap"]), jax.tree.leaves(found["shard_map"]), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    (_, aux), gradient = found["vmap"]
    assert aux["rows"].shape == (16,) and int(aux["count"]) == 16 and gradient["up"].value.shape == (2, 16, 64)


def test_what_vmap_does_not_take(mesh: jax.sharding.Mesh) -> None:
    def traced(loss: Any, mesh: Any = mesh, axis: Any = "data", size: int = 16, **options: Any) -> Any:
        rows = jax.ShapeDtypeStruct((size, 16), jnp.float32)
        shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
        value_and_grad = gc.local_value_and_grad(loss, axis_name=axis, mesh=mesh, by="vmap", **options)
        return jax.eval_shape(value_and_grad, shapes, (rows, rows))

    def along_data(params: Any, batch: Any) -> Any:
        return loss(params, jax.lax.with_sharding_constraint(batch, NamedSharding(mesh, P("data"))))

    with pytest.raises(ValueError, match=r"a constraint in the loss names 'data'.*leave that axis out"):
        traced(along_data)
    with pytest.raises(ValueError, match="same on all workers"):
        traced(lambda params, batch: jax.lax.pmean(loss(params, batch), "data"))
    with pytest.raises(ValueError, match=r"2 devices along 'data' do not divide the batch '0' of 15"):
        traced(loss, size=15)
    with pytest.raises(ValueError, match=r"along one axis of a mesh of Auto type, got \('data', 'tensor'\)"):
        traced(loss, axis=("data", "tensor"))
    explicit = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    with pytest.raises(ValueError, match=r"along one axis of a mesh of Auto type"):
        traced(loss, mesh=explicit)
    with pytest.raises(ValueError, match=r"by='vmap' is for use outside of the axis: give the mesh"):
        traced(loss, mesh=None)
    with pytest.raises(ValueError, match=r"by must be one of"):
        gc.local_value_and_grad(loss, axis_name="data", mesh=mesh, by="pmap")


def test_gradients_marked_by_hand(mesh: jax.sharding.Mesh) -> None:
    tx = gc.unreduced(optax.chain(gc.dense(axis_name="data"), optax.sgd(1.0)), mesh)
    rng = np.random.default_rng(3)
    gradients = {name: rng.normal(size=(2, *shape)).astype(np.float32) for name, shape in SHAPES.items()}
    marked = jax.tree.map(lambda g: gc.PerDevice(g, rows=1, lifted=True), gradients)
    opt_state = tx.init(params(mesh))
    updates, _ = jax.jit(tx.update)(marked, opt_state, params(mesh))
    for name, gradient in gradients.items():
        np.testing.assert_allclose(updates[name], -gradient.mean(0), rtol=1e-6)
    # Only the first of a worker's two would count.
    four = {**marked, "up": gc.PerDevice(np.ones((4, 16, 64), np.float32), rows=1, lifted=True)}
    with pytest.raises(
        ValueError, match=r"gradient of 'up' is marked .* shape is \[4, 16, 64\]: 2 workers have \[2, \.\.\.\]"
    ):
        jax.eval_shape(tx.update, four, opt_state, params(mesh))
