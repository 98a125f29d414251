"""A state's own ``apply_gradients`` is what moves it."""

import functools
from typing import Any

import flax.struct
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc
from tests.training.problem import batch, loss, mesh_of, on, params

Flax = flax.training.train_state.TrainState


def averaged(ema: Any, new: Any) -> Any:
    return jax.tree.map(lambda e, p: (0.9 * e + 0.1 * p).astype(e.dtype), ema, new)


class Averaged(Flax):
    ema: Any = None

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Any:
        new = super().apply_gradients(grads=grads, **kwargs)
        return new.replace(ema=averaged(self.ema, new.params))


@flax.struct.dataclass
class Forked:
    """Not of flax's class, with another order of things."""

    step: Any
    params: Any
    opt_state: Any
    ema: Any
    tx: Any = flax.struct.field(pytree_node=False)

    def apply_gradients(self, grads: Any) -> Any:
        updates, opt_state = self.tx.update(grads, self.opt_state, params=self.params)
        moved = optax.apply_updates(self.params, updates)
        return self.replace(step=self.step + 1, params=moved, opt_state=opt_state, ema=averaged(self.ema, moved))


def chain() -> Any:
    return optax.chain(gc.dense(axis_name="data"), optax.sgd(0.1))


def own(kind: type, **more: Any) -> Any:
    mine = jax.tree.map(jnp.asarray, params())
    if kind is Forked:
        return Forked(0, mine, (), mine, chain())
    return kind.create(apply_fn=loss, params=mine, tx=chain(), **({"ema": mine} if kind is Averaged else {}), **more)


@functools.cache
def plain() -> Any:
    return gc.init_state(params(), chain(), mesh_of(2))


def as_kind(kind: type, **more: Any) -> Any:
    """A placed state as one of a class of flax's, without another program."""
    return kind(plain().step, loss, plain().params, chain(), plain().opt_state, **more)


@pytest.mark.parametrize("kind", (Averaged, Forked))
def test_an_average_in_apply_gradients_moves(kind: type) -> None:
    mesh, tx = mesh_of(2), chain()
    state = gc.init_state(own(kind), tx, mesh)
    kept, treedef = state.tx, jax.tree.structure(state)
    step, expected = gc.make_train_step(loss, tx, mesh), params()["w"]
    ours, reference = plain(), gc.make_train_step(loss, tx, mesh, donate=False)
    for number in range(2):
        state, metrics = step(state, on(mesh, batch(number)))
        ours, other = reference(ours, on(mesh, batch(number)))
        expected = 0.9 * expected + 0.1 * np.asarray(ours.params["w"])
        np.testing.assert_allclose(metrics["loss"], other["loss"], rtol=1e-6)
    np.testing.assert_allclose(state.ema["w"], expected, rtol=1e-6)
    for name in ("w", "b", "v"):
        np.testing.assert_array_equal(state.params[name], ours.params[name])
    assert np.any(np.asarray(state.ema["w"]) != params()["w"])
    assert type(state) is kind and state.tx is kept and jax.tree.structure(state) == treedef
    assert int(state.step) == 2 and step._cache_size() == 1


@pytest.mark.slow
def test_an_optimizer_in_apply_gradients_has_the_extra_arguments_of_a_step() -> None:
    """A weight comes to ``gc.weighted``, and a worker that counts for nothing moves nothing."""
    mesh = mesh_of(2)
    tx = optax.chain(gc.weighted(gc.dense(axis_name="data"), axis_name="data"), optax.sgd(0.1))
    step = gc.make_train_step(lambda p, b: loss(p, b["data"]), tx, mesh, weight=lambda b: b["weight"][0])
    data = {"data": batch(0), "weight": np.repeat(np.array([1.0, 0.0], np.float32), 12)}
    state, _ = step(gc.init_state(own(Averaged), tx, mesh), on(mesh, data))
    half = jax.tree.map(lambda a: a[:12], batch(0))
    gradient = jax.grad(loss)(jax.tree.map(jnp.asarray, params()), half)
    np.testing.assert_allclose(state.params["w"], params()["w"] - 0.1 * gradient["w"], rtol=1e-5, atol=1e-6)


class Statistics(Flax):
    """A model state is an argument of it, and becomes what it makes of it."""

    batch_stats: Any = None

    def apply_gradients(self, *, grads: Any, batch_stats: Any) -> Any:
        return super().apply_gradients(grads=grads, batch_stats=jax.tree.map(lambda x: 2 * x, batch_stats))


@pytest.mark.slow
def test_a_model_state_is_given_to_an_apply_gradients_that_names_it() -> None:
    mesh, tx = mesh_of(2), chain()
    state = gc.init_state(own(Statistics, batch_stats={"mean": jnp.zeros(12)}), tx, mesh)
    step = gc.make_train_step(lambda p, b, model_state: (loss(p, b), {"mean": b["x"].mean(0)}), tx, mesh)
    new, _ = step(state, on(mesh, batch(0)))
    np.testing.assert_allclose(new.batch_stats["mean"], 2 * batch(0)["x"].mean(0), rtol=1e-5, atol=1e-6)


class Norm(Flax):
    norm: Any = None

    def apply_gradients(self, *, grads: Any) -> Any:
        return super().apply_gradients(grads=grads, norm=jnp.linalg.norm(grads["w"]))


class MeanNorm(Norm):
    def apply_gradients(self, *, grads: Any) -> Any:
        norm = lax.pmean(jnp.linalg.norm(grads["w"]), "data")
        return Flax.apply_gradients(self, grads=grads, norm=norm)


class Unused(Flax):
    def apply_gradients(self, *, grads: Any) -> Any:
        return self.replace(params=optax.apply_updates(self.params, grads))


class More(Flax):
    def apply_gradients(self, *, grads: Any, loss: Any) -> Any:
        return super().apply_gradients(grads=grads)


class Grown(Flax):
    ema: Any = None

    def apply_gradients(self, *, grads: Any) -> Any:
        return super().apply_gradients(grads=grads, ema=self.params)


class NoField(gc.TrainState):
    def apply_gradients(self, *, grads: Any) -> Any:
        return self


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Norm, r"'norm' of the state differs by worker after apply_gradients of Norm.*jax.lax.pmean\(x, 'data'\)"),
        (Unused, r"apply_gradients of Unused does not call self.tx.update.*or give make_train_step a state without"),
        (More, r"apply_gradients of More takes loss besides grads, which a step does not have: give them defaults"),
        (Grown, r"apply_gradients of Grown returns a state of another structure.*from the start, in init_state"),
        (NoField, r"apply_gradients of NoField cannot be given the step's optimizer, as no field tx holds one"),
    ],
)
def test_an_apply_gradients_that_a_step_cannot_call_is_refused(kind: type, sentence: str) -> None:
    mesh, tx = mesh_of(2), chain()
    more = {"norm": np.float32(0)} if kind is Norm else {}
    state = NoField(*plain()) if kind is NoField else as_kind(kind, **more)
    with pytest.raises(ValueError, match=sentence):
        gc.make_train_step(loss, tx, mesh).trace(state, on(mesh, batch(0)))


def test_what_is_averaged_of_the_gradients_is_kept() -> None:
    mesh, tx = mesh_of(2), chain()
    assert gc.make_train_step(loss, tx, mesh).trace(as_kind(MeanNorm, norm=np.float32(0)), on(mesh, batch(0)))


@pytest.mark.slow
def test_parameters_that_are_not_whole_are_refused() -> None:
    mesh = mesh_of(2)
    sentence = (
        r"each worker has its own, or a shard: give make_train_step a state without apply_gradients.*replicas=True and"
    )
    tx = optax.chain(gc.dense(axis_name="data"), optax.sgd(0.1))
    replicas = gc.init_state(own(Averaged), tx, mesh, replicas=True)
    with pytest.raises(ValueError, match=sentence):
        gc.make_train_step(loss, tx, mesh).trace(replicas, on(mesh, batch(0)))
    specs = {"w": P("data"), "v": P(), "b": P()}
    collective = gc.collectives.ReduceScatter(specs)
    tx = optax.chain(gc.exchange(gc.compressors.dense(), axis_name="data", collective=collective), optax.sgd(0.1))
    sharded = gc.init_state(own(Averaged), tx, mesh, param_specs=specs)
    with pytest.raises(ValueError, match=sentence):
        gc.make_train_step(loss, tx, mesh, param_specs=specs).trace(sharded, on(mesh, batch(0)))
