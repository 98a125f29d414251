"""Methods inside the rest of optax, and misuse that must be refused."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import gradcomp_jax as gc
from gradcomp_jax.methods import METHODS as REGISTERED
from tests.marks import slow_but

from .environments import AXIS, WORKERS, environment, exchange_state, mesh_of, vmapped_init
from .methods import FEW, METHODS, SOME, VARIANTS
from .test_conformance import gradients, parameters

each_method = pytest.mark.parametrize("method", [m for m in METHODS if m in FEW])
"""What surrounds a method is the same for all."""
P = PartitionSpec


@each_method
def test_abstract_init(method: str) -> None:
    tx = METHODS[method].make(AXIS)
    spec = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), parameters())
    outside = jax.eval_shape(tx.init, spec)
    inside = jax.eval_shape(environment("shard_map-auto-vma", tx).init, parameters())
    assert jax.tree.structure(outside) == jax.tree.structure(inside)
    for mark in jax.tree.leaves(outside, is_leaf=lambda x: isinstance(x, gc.PerDevice)):
        if isinstance(mark, gc.PerDevice):
            assert mark.value.dtype == jnp.float32


@each_method
def test_extra_arguments_and_scan(method: str) -> None:
    """Three steps in one program, with an argument that only other transformations know."""
    tx = optax.chain(METHODS[method].make(AXIS), optax.sgd(0.1))
    mesh = mesh_of(AxisType.Auto)
    params = {k: v for k, v in parameters().items() if k in ("bias", "matrix")}
    each = [{k: g[k] for k in params} for g in (gradients("normal", s) for s in range(3))]
    stacked = jax.tree.map(lambda *g: np.stack(g), *each)
    state = gc.init_state(params, tx, mesh, axis_name=AXIS)
    specs = gc.state_specs(state, axis_name=AXIS)

    def local(state, gradient):
        def body(carry, g):
            updates, opt_state = tx.update(g, carry.opt_state, carry.params, value=jnp.float32(1), unknown=None)
            return gc.TrainState(carry.step + 1, optax.apply_updates(carry.params, updates), opt_state), None

        return jax.lax.scan(body, state, jax.tree.map(lambda a: a[:, 0], gradient))[0]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs, P(None, AXIS)), out_specs=specs)
    scanned = jax.jit(mapped)(state, stacked)
    world = environment("shard_map-auto-vma", tx)
    loop_state, loop_params = world.init(params), params
    for gradient in each:
        updates, loop_state = world.update(gradient, loop_state, loop_params)
        loop_params = {name: loop_params[name] + np.asarray(updates[name])[0] for name in params}
    for name in params:
        np.testing.assert_allclose(scanned.params[name], loop_params[name], rtol=1e-5, atol=1e-5)
    assert int(exchange_state(scanned.opt_state).step) == 3


@each_method
def test_masked_and_partition(method: str) -> None:
    params = {k: v for k, v in parameters().items() if k in ("bias", "matrix")}
    gradient = {k: g for k, g in gradients("normal").items() if k in params}
    mask = {"bias": False, "matrix": True}
    masked = optax.masked(METHODS[method].make(AXIS), mask)
    world = environment("vmap", masked)
    updates, _ = world.update(gradient, world.init(params), params)
    np.testing.assert_array_equal(updates["bias"], gradient["bias"])
    assert len({u.tobytes() for u in np.asarray(updates["matrix"])}) == 1

    split = optax.partition(
        {"a": METHODS[method].make(AXIS), "b": gc.dense(axis_name=AXIS)}, {"bias": "b", "matrix": "a"}
    )
    world = environment("vmap", split)
    both, _ = world.update(gradient, world.init(params), params)
    np.testing.assert_array_equal(both["matrix"], updates["matrix"])
    np.testing.assert_allclose(np.asarray(both["bias"])[0], np.mean(gradient["bias"], axis=0), atol=1e-5)


@each_method
def test_what_the_workers_of_a_vmap_share_is_taken_as_if_each_had_its_own(method: str) -> None:
    """A gradient and a state that ``vmap`` does not map, in a program of their own and not."""
    tx = METHODS[method].make(AXIS)
    params = {k: v for k, v in parameters().items() if k in ("bias", "matrix")}
    gradient = jax.tree.map(lambda g: g[0], {k: g for k, g in gradients("normal").items() if k in params})

    def update(gradient, state):
        return tx.update(gradient, state, params)[0]

    def three(gradient):
        # Where devices differ in their state, an owner's rows and a key's part, those of the first.
        started = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(jnp.arange(WORKERS))
        state = jax.tree.map(lambda a: a[0], started)
        many = jax.tree.map(lambda a: jnp.stack([a] * WORKERS), (gradient, state))
        over = {"axis_name": AXIS, "axis_size": WORKERS}
        shared = [jax.vmap(f, in_axes=None, **over)(gradient, state) for f in (update, jax.jit(update))]
        return [*shared, jax.vmap(update, **over)(*many)]

    shared, in_a_program, each = jax.tree.map(np.asarray, jax.jit(three)(gradient))
    for name in params:
        assert shared[name].shape == (WORKERS, *params[name].shape)
        # What all share is multiplied where the others are added up, in bfloat16 if that is what is summed.
        near = {"rtol": 2**-6 if method == "dense-bf16-sum" else 1e-5, "atol": 1e-6 * max(1, np.abs(each[name]).max())}
        for found in (shared, in_a_program):
            np.testing.assert_allclose(found[name], each[name], **near)


@pytest.mark.standard_promotion
def test_inject_hyperparams() -> None:
    """In float32 from end to end: a hyper-parameter that is traced rounds otherwise than one that is folded in.

    That is one unit in float32, and at a tie one in bfloat16, which this bound would not let pass.
    """
    make = optax.inject_hyperparams(gc.dgc, static_args=("density", "axis_name", "downlink_density", "block"))
    fixed = {"axis_name": AXIS, "density": 0.02, "clip_norm": 3.0, "weight_decay": 0.1, "dtype": "float32"}
    tx = make(momentum=optax.linear_schedule(0.5, 0.9, 3), **fixed)
    plain = gc.dgc(momentum=0.5, **fixed)
    params, gradient = ({k: v for k, v in tree.items() if k != "half"} for tree in (parameters(), gradients("normal")))
    results = []
    for candidate in (tx, plain):
        world = environment("vmap", candidate)
        state = world.init(params)
        updates, _ = world.update(gradient, state, params)
        results.append(updates)
    for name in params:
        np.testing.assert_allclose(results[0][name], results[1][name], rtol=1e-5, atol=1e-5)


@pytest.mark.standard_promotion
def test_a_traced_density_is_refused_with_its_remedy() -> None:
    tx = optax.inject_hyperparams(gc.dgc)(axis_name=AXIS, density=0.02)
    with pytest.raises(TypeError, match="static_args"):
        jax.eval_shape(tx.init, parameters())


@each_method
def test_reduced_gradients_are_refused(method: str) -> None:
    """jax.grad of replicated parameters has summed already: nothing is left to compress."""
    tx = METHODS[method].make(AXIS)
    mesh = mesh_of(AxisType.Auto)
    params = {"matrix": np.ones((61, 37), np.float32)}
    state = jax.eval_shape(lambda p: gc.init_state(p, tx, mesh, axis_name=AXIS).opt_state, params)

    def step(state, x):
        gradient = jax.grad(lambda p: jnp.mean(x @ p["matrix"]))(params)
        return tx.update(gradient, state, params)

    specs = gc.state_specs(state, axis_name=AXIS)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P(AXIS)), out_specs=(P(), specs))
    with pytest.raises(ValueError, match=r"(?s)'matrix' is already reduced over 'data'.*local_value_and_grad"):
        jax.eval_shape(mapped, state, np.ones((16, 61), np.float32))


@each_method
def test_outside_the_axis_is_refused(method: str) -> None:
    tx = METHODS[method].make(AXIS)
    params = parameters()
    state = jax.eval_shape(tx.init, params)
    with pytest.raises(NameError, match="axis_name=None"):
        jax.eval_shape(tx.update, params, state, params)


@pytest.mark.parametrize("method", slow_but(FEW, [m for m in METHODS if m in SOME or m in VARIANTS]))
def test_one_worker_needs_no_axis(method: str) -> None:
    """axis_name=None is the local round trip: what a single worker on a mesh of one computes."""
    params = {k: v for k, v in parameters().items() if k in ("bias", "matrix")}
    gradient = {k: g[0] for k, g in gradients("normal").items() if k in params}
    alone = METHODS[method].make(None)
    updates, state = jax.jit(alone.update)(gradient, jax.jit(alone.init)(params), params)
    tx = METHODS[method].make(AXIS)
    one = jax.vmap(tx.update, axis_name=AXIS, in_axes=(0, 0, None), axis_size=1)
    states = jax.jit(jax.vmap(tx.init, axis_name=AXIS, in_axes=None, axis_size=1))(params)
    mapped, _ = jax.jit(one)(jax.tree.map(lambda a: a[None], gradient), states, params)
    for name in params:
        np.testing.assert_allclose(np.asarray(mapped[name])[0], updates[name], rtol=1e-5, atol=1e-5)
    assert int(exchange_state(state).skipped) == 0


@pytest.mark.parametrize("kind", [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.slow)])
@pytest.mark.parametrize("code", ["frequencies", pytest.param("topk", marks=pytest.mark.slow)])
def test_one_worker_on_a_mesh_compiles_once(code: str, kind: AxisType, compiled: Callable[[], int]) -> None:
    """However its arrays' shardings are spelled: as placed after a restore, and as a step returns them."""
    inner = gc.compressors.topk(0.25, block=4, dtype=jnp.float32)
    tx = gc.exchange(
        gc.compressors.in_frequency(inner) if code == "frequencies" else inner,
        axis_name=AXIS,
        view="columns",
        collective=gc.collectives.TwoPhase("server"),
        mask=True,
    )
    mesh, params = mesh_of(kind, 1), {"w": np.zeros((4, 3), np.float32)}
    state = gc.init_state(params, tx, mesh, axis_name=AXIS).opt_state
    marks = gc.state_specs(state, axis_name=AXIS)
    gradient = jax.device_put({"w": np.ones((4, 3), np.float32)}, jax.NamedSharding(mesh, P(AXIS)))

    @jax.jit
    def update(gradient: Any, state: Any) -> Any:
        return jax.shard_map(tx.update, mesh=mesh, in_specs=(P(AXIS), marks), out_specs=(P(), marks))(gradient, state)

    placed = jax.device_put(state, gc.state_shardings(state, mesh, axis_name=AXIS))
    before = compiled()
    for start in (state, placed):
        for _ in range(3):
            _, start = update(gradient, start)
    assert compiled() == before + 1


@pytest.mark.parametrize(
    ("method", "workers"),
    slow_but(
        [("dgc", 1), ("dgc", 5)], [("dgc", 1), ("dgc", 5), ("terngrad", 3), ("topk-server", 7), ("int8-put-back", 2)]
    ),
)
def test_any_number_of_workers(method: str, workers: int) -> None:
    assert workers != WORKERS
    tx = METHODS[method].make(AXIS)
    params = {k: v for k, v in parameters().items() if k in ("bias", "matrix")}
    gradient = {k: g[:workers] for k, g in gradients("normal").items() if k in params}
    axes = gc.state_axes(jax.eval_shape(tx.init, params))
    state = vmapped_init(tx, params, workers)
    update = jax.vmap(tx.update, axis_name=AXIS, in_axes=(0, axes, None), out_axes=(0, axes))
    updates, state = jax.jit(update)(gradient, state, params)
    for name in params:
        assert len({u.tobytes() for u in np.asarray(updates[name])}) == 1
    np.testing.assert_allclose(np.asarray(updates["bias"])[0], np.mean(gradient["bias"], axis=0), atol=2**-7 * 100)


def test_integer_gradients_are_refused() -> None:
    tx = gc.terngrad(axis_name=None)
    with pytest.raises(TypeError, match=r"'steps' has dtype int32.*optax\.multi_transform"):
        tx.init({"steps": jnp.zeros((3, 4), jnp.int32)})


def test_a_server_residual_from_outside_the_axis_is_refused() -> None:
    tx = METHODS["int8-server"].make(AXIS)
    params = parameters()
    state = jax.eval_shape(jax.vmap(tx.init, in_axes=None, axis_size=WORKERS), params)
    axes = jax.tree.map(lambda _: 0, state)
    with pytest.raises(ValueError, match=r"initialise inside the axis"):
        jax.eval_shape(jax.vmap(tx.update, axis_name=AXIS, in_axes=(0, axes, None)), gradients("normal"), state, params)


@pytest.mark.parametrize("name", ["dgc", "topk_sgd", "gradient_dropping", "random_k", "ef21", "sparcml"])
def test_selections_are_explicit_about_ranks(name: str) -> None:
    """With jax_numpy_rank_promotion="raise", as some teams have it."""
    mesh, leaf = jax.make_mesh((3,), ("data",), (AxisType.Auto,), devices=jax.devices()[:3]), jnp.zeros((64, 40))
    tx = REGISTERED[name].build(axis_name="data")
    state, specs = gc.init_opt_state({"w": leaf}, tx, mesh, axis_name="data")

    def worker(g, s):
        return tx.update({"w": g[0]}, s, {"w": leaf})

    mapped = jax.shard_map(
        worker, mesh=mesh, in_specs=(PartitionSpec("data"), specs), out_specs=(PartitionSpec(), specs)
    )
    with jax.numpy_rank_promotion("raise"):
        updates, _ = jax.eval_shape(mapped, jnp.zeros((3, 64, 40)), state)
    assert updates["w"].shape == leaf.shape
