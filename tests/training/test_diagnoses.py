"""What is wrong is said by its own name, through every door: a train step, ``unreduced``, and a loop of one's own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc
from tests.training.problem import mesh_of

N = 2
X = np.ones((N, 8), np.float32)


def params() -> dict[str, np.ndarray]:
    return {"w": np.ones((8, 8), np.float32), "b": np.zeros(8, np.float32)}


def loss(p: Any, x: Any) -> Any:
    return jnp.mean((x @ p["w"] + p["b"]) ** 2)


def exchange() -> optax.GradientTransformation:
    return gc.dgc(axis_name="data", block=16)


def chain() -> optax.GradientTransformation:
    return optax.chain(exchange(), optax.sgd(0.1))


def by_step(tx: Any, then: Any, p: Any, loss: Any) -> None:
    mesh = mesh_of(N)
    gc.make_train_step(loss, then, mesh, donate=False)(gc.init_state(p, tx, mesh), X)


def by_unreduced(tx: Any, then: Any, p: Any, loss: Any) -> None:
    mesh = mesh_of(N)
    state = gc.unreduced(tx, mesh).init(p)
    gradient = gc.local_value_and_grad(loss, axis_name="data", mesh=mesh)(p, X)[1]
    jax.eval_shape(gc.unreduced(then, mesh).update, gradient, state, p)


def by_loop(tx: Any, then: Any, p: Any, loss: Any) -> None:
    mesh = mesh_of(N)
    state, specs = gc.init_opt_state(p, tx, mesh)

    def step(p: Any, state: Any, x: Any) -> Any:
        _, gradient = gc.local_value_and_grad(loss, axis_name="data")(p, x)
        return then.update(gradient, state, p)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
    jax.eval_shape(mapped, p, state, X)


DOORS = [by_step, *(pytest.param(door, marks=pytest.mark.slow) for door in (by_unreduced, by_loop))]


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_two_exchanges_in_one_chain(door: Callable[..., None]) -> None:
    tx = optax.chain(exchange(), chain())
    with pytest.raises(ValueError, match=r"after another exchange in the chain it is the mean.*leave one out"):
        door(tx, tx, params(), loss)


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_freezing_midway(door: Callable[..., None]) -> None:
    now, then = (optax.masked(chain(), {"w": kept, "b": True}) for kept in (True, False))
    with pytest.raises(ValueError, match=r"mask or labels have changed since.*gradcomp_jax\.replace_method"):
        door(now, then, params(), loss)


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_complex_parameters(door: Callable[..., None]) -> None:
    p = {**params(), "w": np.ones((8, 8), np.complex64)}
    with pytest.raises(TypeError, match=r"complex64.*optax\.contrib\.split_real_and_imaginary"):
        door(chain(), chain(), p, lambda p, x: jnp.mean(jnp.abs(x @ p["w"])))


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS[:1])
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda p, x: (loss(p, x), x), r"returns a tuple.*has_aux=True"),
        (lambda p, x: (x @ p["w"]) ** 2, r"an array of shape .*one number: the mean over its batch"),
        (lambda p, x: None, r"returns None, and must return one number"),
        (lambda p, x: jnp.int32(1), r"the loss is int32, and must be a real"),
    ],
    ids=["aux", "vector", "none", "integer"],
)
def test_a_loss_that_is_no_number(door: Callable[..., None], wrong: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        door(chain(), chain(), params(), wrong)


@pytest.mark.slow
def test_aux_that_is_not_there() -> None:
    with pytest.raises(TypeError, match=r"has_aux=True is for a loss that returns \(loss, aux\)"):
        gc.local_value_and_grad(loss, axis_name=None, has_aux=True)(params(), X)


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_parameters_that_are_no_arrays(door: Callable[..., None]) -> None:
    with pytest.raises(TypeError, match=r"'activation' is no array.*eqx\.partition.*eqx\.combine"):
        door(chain(), chain(), {**params(), "activation": jax.nn.relu}, loss)
