"""What Flax overwrites with its gradient has the workers' maximum, and no optimizer trains it."""

import functools
from typing import Any

import flax.core
import flax.linen as nn
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen import fp8_ops
from jax import lax
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc
from tests.training.problem import mesh_of, on

OWG = fp8_ops.OVERWRITE_WITH_GRADIENT
Flax = flax.training.train_state.TrainState


@jax.custom_vjp
def watched(x: Any, history: Any, seen: Any) -> Any:
    """Returns ``x``; the gradient of a history is the largest entry that was seen, and what it has seen before."""
    return x


def _forward(x: Any, history: Any, seen: Any) -> Any:
    return x, (jnp.concatenate([jnp.max(seen)[None], history[:-1]]), seen)


watched.defvjp(_forward, lambda kept, g: (g, kept[0], jnp.zeros_like(kept[1])))


def loss(params: Any, batch: Any) -> Any:
    x = watched(batch["x"], params[OWG]["layer"]["amax"], batch["seen"])
    return jnp.mean(jnp.square(x @ params["params"]["w"]))


def params() -> Any:
    w = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    return {"params": {"w": w}, OWG: {"layer": {"amax": np.zeros(2, np.float32)}}}


def batch(*seen: float) -> Any:
    x = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
    return {"x": x, "seen": np.asarray(seen, np.float32)}


def chain(optimizer: Any = None) -> Any:
    return optax.chain(gc.dense(axis_name="data"), optimizer or optax.sgd(0.1, 0.9))


def amax(state: Any) -> Any:
    return np.asarray(getattr(state, "params", state)[OWG]["layer"]["amax"])


@functools.cache
def begun() -> Any:
    return gc.init_state(params(), chain(), mesh_of(2))


def test_all_workers_take_the_largest_value_and_no_optimizer_moves_it() -> None:
    """Of 7 and 15 it is 15. A step that is skipped leaves it, and so does a value that is not finite."""
    mesh, tx, state = mesh_of(2), chain(), begun()
    step = gc.make_train_step(loss, tx, mesh, accumulate=2, donate=False)
    assert jax.tree.structure(state.opt_state[1][0].trace) == jax.tree.structure(params()["params"])
    state, _ = step(state, on(mesh, batch(7, 3, 2, 15)))
    np.testing.assert_array_equal(amax(state), [15, 0])
    state, _ = step(state, on(mesh, batch(1, 9, 2, 8)))
    np.testing.assert_array_equal(amax(state), [9, 15])
    for bad in (np.nan, np.inf):
        moved, _ = step(state, on(mesh, batch(1, 2, bad, 3)))
        np.testing.assert_array_equal(amax(moved), [9, 15])
        assert np.any(np.asarray(moved.params["params"]["w"]) != np.asarray(state.params["params"]["w"]))
    overflown = batch(1, 2, 3, 4)
    overflown["x"][0, 0] = np.inf
    still, metrics = step(state, on(mesh, overflown))
    assert metrics["skipped"] == 1
    np.testing.assert_array_equal(amax(still), [9, 15])


class Averaged(Flax):
    ema: Any = None

    def apply_gradients(self, *, grads: Any) -> Any:
        new = super().apply_gradients(grads=grads)
        return new.replace(ema=jax.tree.map(lambda e, p: 0.5 * e + 0.5 * p, self.ema, new.params))


class Layer(nn.Module):
    operation: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(4, dot_general_cls=functools.partial(self.operation, amax_history_length=3))(x)


def fp8_problem(operation: Any) -> Any:
    """A layer of Flax's in fp8, its loss, its variables and batches."""
    model, data = Layer(operation), np.random.default_rng(0).normal(size=(2, 8, 6)).astype(np.float32)
    variables = model.init(jax.random.key(0), data[0])
    return model, lambda p, x: jnp.mean(model.apply(p, x) ** 2), variables, data


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")
@pytest.mark.parametrize(
    ("operation", "kind"), [(fp8_ops.Fp8DirectDotGeneralOp, Averaged), (fp8_ops.Fp8DotGeneralOp, Flax)]
)
def test_a_layer_of_flax_in_fp8(operation: Any, kind: type) -> None:
    """Flax's own ``apply_gradients``, of the mean of two workers' gradients and the maximum of the rest, is the same."""
    mesh, tx = mesh_of(2), chain(optax.adam(0.1))
    model, fp8_loss, variables, data = fp8_problem(operation)
    more = {"ema": variables} if kind is Averaged else {}
    state = gc.init_state(kind.create(apply_fn=model.apply, params=variables, tx=optax.adam(0.1), **more), tx, mesh)
    alone = kind.create(apply_fn=model.apply, params=variables, tx=optax.adam(0.1), **more)
    step, gradient = gc.make_train_step(fp8_loss, tx, mesh), jax.jit(jax.grad(fp8_loss))
    for x in (*data, data[0]):
        state, _ = step(state, on(mesh, x))
        each = [gradient(alone.params, half) for half in np.split(x, 2)]
        mean = jax.tree.map(lambda a, b: (a + b) / 2, *(g["params"] for g in each))
        largest = jax.tree.map(np.maximum, *(g[OWG] for g in each))
        alone = alone.apply_gradients(grads={"params": mean, OWG: largest})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state.params, alone.params)
    if kind is Averaged:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state.ema, alone.ema)
    scales = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.params[OWG]) if "scale" in str(path)]
    assert len(scales) == 3 and all(0 < float(scale[0]) < 1 for scale in scales)


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_the_dtype_in_which_flax_takes_the_maximum_of_several_uses() -> None:
    """A layer that is used three times in a step has the largest of its three values, and of the workers' largest."""
    mesh, tx = mesh_of(2), chain()

    def several(params: Any, x: Any) -> Any:
        scale, history = (lax.convert_element_type(params[OWG][name], fp8_ops.fm32) for name in ("scale", "amax"))

        def body(carry: Any, _: Any) -> Any:
            carry = fp8_ops.in_qdq(jnp.float32, jnp.float8_e4m3fn, carry, scale, history)
            return 2 * carry, None

        return jnp.mean(lax.scan(body, x * params["params"]["w"], None, length=3)[0])

    ones = {"params": {"w": np.float32(1)}, OWG: {"scale": np.ones(1, np.float32), "amax": np.zeros(3, np.float32)}}
    state, _ = gc.make_train_step(several, tx, mesh)(
        gc.init_state(ones, tx, mesh), on(mesh, np.array([1.0, 4.0], np.float32))
    )
    np.testing.assert_array_equal(state.params[OWG]["amax"], [16, 0, 0])


@pytest.mark.slow
def test_flax_s_loop_in_plain_jit() -> None:
    mesh = mesh_of(2)
    value_and_grad = gc.local_value_and_grad(loss, axis_name="data", mesh=mesh)
    state = Flax.create(apply_fn=loss, params=jax.tree.map(jnp.asarray, params()), tx=gc.unreduced(chain(), mesh))

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        return state.apply_gradients(grads=value_and_grad(state.params, batch)[1])

    ours, data = gc.init_state(params(), chain(), mesh), on(mesh, batch(7, 3, 2, 15))
    ours, _ = gc.make_train_step(loss, chain(), mesh)(ours, data)
    state = step(state, data)
    np.testing.assert_array_equal(amax(state), [15, 0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), state.params, ours.params)


@pytest.mark.slow
def test_any_mapping_and_any_mesh() -> None:
    """What a frozen mapping returns for a key is of another type than what lies in it."""
    mesh, given = mesh_of(2, explicit=True), flax.core.freeze(params())
    state = gc.init_state(Flax.create(apply_fn=loss, params=given, tx=chain()), chain(), mesh)
    state, _ = gc.make_train_step(loss, chain(), mesh)(state, on(mesh, batch(7, 3, 2, 15)))
    np.testing.assert_array_equal(amax(state), [15, 0])
    assert jax.tree.structure(state.params) == jax.tree.structure(given)


@pytest.mark.slow
def test_what_weighs_nothing_is_not_looked_at() -> None:
    mesh = mesh_of(2)
    tx = optax.chain(gc.weighted(gc.dense(axis_name="data"), axis_name="data"), optax.sgd(0.1))
    step = gc.make_train_step(
        lambda p, b: loss(p, b["data"]), tx, mesh, accumulate=2, weight=lambda b: b["weight"].sum()
    )
    for weights, expected in (([1, 1, 0, 0], 7), ([0, 0, 0, 0], 0)):
        data = {"data": batch(7, 3, 2, 15), "weight": np.asarray(weights, np.float32)}
        state, _ = step(gc.init_state(params(), tx, mesh), on(mesh, data))
        np.testing.assert_array_equal(amax(state), [expected, 0])


@pytest.mark.slow
def test_moments_of_sharded_parameters_lie_as_these() -> None:
    mesh, specs = mesh_of(2), {"params": {"w": P("data")}, OWG: P()}
    collective = gc.collectives.ReduceScatter(specs["params"])
    exchange = gc.exchange(gc.compressors.dense(), axis_name="data", collective=collective)
    tx = optax.chain(exchange, optax.sgd(0.1, 0.9))
    state = gc.init_state(params(), tx, mesh, param_specs=specs)
    assert gc.state_specs(state, param_specs=specs).opt_state[1][0].trace["w"] == P("data")
    state, _ = gc.make_train_step(loss, tx, mesh, param_specs=specs)(state, on(mesh, batch(7, 3, 2, 15)))
    np.testing.assert_array_equal(amax(state), [15, 0])
    assert state.opt_state[1][0].trace["w"].sharding.spec == P("data")
    with pytest.raises(ValueError, match=rf"param_specs lay a part of it along 'data': give .*'{OWG}': jax.P\(\)"):
        gc.init_state(params(), tx, mesh, param_specs={"params": {"w": P("data")}, OWG: P("data")})


def test_buckets_are_in_the_order_of_the_loss() -> None:
    mesh = mesh_of(2)
    tx = optax.chain(gc.bucketed(gc.dense(axis_name="data"), bucket_bytes=8), optax.sgd(0.1, 0.9))
    assert gc.make_train_step(loss, tx, mesh).trace(begun(), on(mesh, batch(7, 3, 2, 15)))


def replicas(step: Any, tx: Any) -> Any:
    mesh = mesh_of(2)
    state = gc.init_state(params(), tx, mesh, replicas=True)
    for seen in ((7, 3, 2, 15), (1, 2, np.nan, 3)):
        state, _ = step(state, on(mesh, batch(*seen)))
    return state


@pytest.mark.slow
def test_each_replica_keeps_its_own() -> None:
    mesh, tx = (
        mesh_of(2),
        optax.chain(optax.sgd(0.1), gc.local_sgd(gc.dense(axis_name="data"), axis_name="data", every=2)),
    )
    state = replicas(gc.make_train_step(loss, tx, mesh), tx)
    np.testing.assert_array_equal(state.params[OWG]["layer"]["amax"].value, [[2, 7], [15, 0]])
    for one in (gc.consolidate(state), gc.consolidate(state, of="centre")):
        np.testing.assert_array_equal(amax(one), [15, 7])
        assert jax.tree.structure(one) == jax.tree.structure(params())
    three = gc.resize_workers(state, old=2, new=3)
    np.testing.assert_array_equal(three.params[OWG]["layer"]["amax"].value, [[15, 7]] * 3)
    assert float(gc.replica_spread(state)) == pytest.approx(float(gc.replica_spread(state.params["params"])))


@pytest.mark.slow
def test_an_exchange_beside_the_steps_computes_the_same() -> None:
    mesh = mesh_of(2)
    step = gc.make_overlapped_step(loss, gc.dense(axis_name="data"), optax.sgd(0.1), mesh, delay=1)
    ours, reference = replicas(step, step.tx), replicas(gc.make_train_step(loss, step.tx, mesh), step.tx)
    step.wait()
    np.testing.assert_array_equal(ours.params[OWG]["layer"]["amax"].value, [[2, 7], [15, 0]])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours.params, reference.params)


@pytest.mark.parametrize(
    ("params", "where"),
    [
        ({"net": params()}, f"net/{OWG}/layer/amax"),
        ({"params": {"net": params()}}, f"params/net/{OWG}/layer/amax"),
        ({"params": {"net": params()}, OWG: {}}, f"params/net/{OWG}/layer/amax"),
        ({**params(), "batch_stats": {"mean": np.zeros(2, np.float32)}}, "batch_stats/mean"),
        ({"w": np.ones(2, np.float32), OWG: params()[OWG]}, f"{OWG}/layer/amax"),
    ],
)
def test_where_it_is_not_clear_what_is_trained_it_is_refused(params: Any, where: str) -> None:
    sentence = (
        rf"'{where}': with Flax's collection '{OWG}' parameters are {{'params': ..., '{OWG}': ...}}, both at the top"
    )
    with pytest.raises(ValueError, match=sentence):
        gc.init_state(params, chain(), mesh_of(2))
    with pytest.raises(ValueError, match=sentence):
        gc.make_train_step(loss, chain(), mesh_of(2)).trace(
            begun()._replace(params=params), on(mesh_of(2), batch(1, 2))
        )


@pytest.mark.parametrize("method", (gc.dense, gc.dgc))
def test_an_exchange_and_an_unreduced_chain_take_none_of_it(method: Any) -> None:
    outside, alone = gc.unreduced(method(axis_name="data"), mesh_of(2)), method(axis_name=None)
    for tx in (outside, alone):
        state = jax.eval_shape(tx.init, params()["params"])
        for call in (tx.init, lambda given, tx=tx, state=state: tx.update(given, state)):
            with pytest.raises(ValueError, match=rf"'{OWG}/layer/amax' is of Flax's collection.*gradients\['params'\]"):
                jax.eval_shape(call, params())


class All(Flax):
    def apply_gradients(self, *, grads: Any) -> Any:
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        return self.replace(params=optax.apply_updates(self.params, updates), opt_state=opt_state)


def test_an_apply_gradients_that_would_train_it_is_refused() -> None:
    state = All(begun().step, loss, begun().params, chain(), begun().opt_state)
    with pytest.raises(ValueError, match=rf"'{OWG}/layer/amax' is of Flax's collection.*as flax's TrainState does"):
        gc.make_train_step(loss, chain(), mesh_of(2)).trace(state, on(mesh_of(2), batch(1, 2, 3, 4)))


def test_an_array_of_flax_s_own_dtype_is_refused() -> None:
    own = jax.jit(lambda x: lax.convert_element_type(x, fp8_ops.fm32))(np.zeros(2, np.float32))
    given = {**params(), OWG: {"layer": {"amax": own}}}
    value_and_grad = gc.local_value_and_grad(loss, axis_name=None)
    for door in (lambda: gc.init_state(given, chain(), mesh_of(2)), lambda: value_and_grad(given, batch(1, 2))):
        with pytest.raises(TypeError, match=r"is fp8_meta32, which no program returns: keep it as float32, and in the"):
            door()
