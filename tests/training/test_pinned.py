"""A state that is pinned replicated: told of where it can be seen, and nothing of it is lost."""

import warnings

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc
from tests.training.problem import batch, loss, mesh_of, on, params

N = 4
PINNED = r"pinned replicated.*residuals.*gradcomp_jax\.state_shardings"


def chain():
    return optax.chain(gc.topk_sgd(axis_name="data", density=0.125, block=16, collective="all_gather"), optax.sgd(0.1))


def wide_params():
    return jax.tree.map(lambda p: np.asarray(p, np.float32), params())


def with_model_axis():
    return jax.make_mesh((N, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def everywhere(state, mesh):
    return NamedSharding(mesh, P())


def right(state, mesh):
    return gc.state_shardings(state, mesh)


def by_unreduced(mesh, pin):
    """One update whose state is pinned before it, traced."""
    tx = gc.unreduced(chain(), mesh)
    state = jax.eval_shape(tx.init, wide_params())
    gradient = jax.eval_shape(
        lambda p: gc.local_value_and_grad(loss, axis_name="data", mesh=mesh)(p, on(mesh, batch(0)))[1], wide_params()
    )
    jax.eval_shape(lambda g, s: tx.update(g, pin(s), wide_params()), gradient, state)


def by_step(mesh, pin):
    """A train step within a program of the client's."""
    state = jax.eval_shape(lambda p: gc.init_state(p, chain(), mesh), wide_params())
    step = gc.make_train_step(loss, chain(), mesh)
    jax.eval_shape(lambda s: step(pin(s), on(mesh, batch(0))), state)


@pytest.mark.parametrize("door", [by_unreduced, by_step])
@pytest.mark.parametrize(
    "pin",
    [
        lambda s, mesh: jax.lax.with_sharding_constraint(s, NamedSharding(mesh, P())),
        lambda s, mesh: jax.device_put(s, NamedSharding(mesh, P())),
        lambda s, mesh: jax.lax.with_sharding_constraint(
            s, jax.tree.map(lambda x: NamedSharding(mesh, P("model") if x.ndim else P()), s)
        ),
    ],
    ids=["constraint", "device_put", "along another axis"],
)
def test_a_program_that_pins_it_before_the_update_is_warned(door, pin) -> None:
    mesh = with_model_axis()
    with pytest.warns(UserWarning, match=PINNED):
        door(mesh, lambda s: pin(s, mesh))


@pytest.mark.parametrize("door", [by_unreduced, by_step])
@pytest.mark.parametrize("workers", [N, 1])
def test_the_right_pin_is_quiet(door, workers) -> None:
    """By the state's own shardings; and one worker has nobody to send to."""
    mesh = (
        mesh_of(workers) if workers > 1 else jax.make_mesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    )
    place = right if workers > 1 else everywhere
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        door(mesh, lambda s: jax.lax.with_sharding_constraint(s, place(s, mesh)))


@pytest.mark.parametrize("door", [by_unreduced, by_step])
def test_an_explicit_axis_refuses_it(door) -> None:
    """Before JAX does, which names in_specs that the client has not written."""
    mesh = mesh_of(N, explicit=True)
    with pytest.raises(
        ValueError, match=r"not split over 'data', an axis of Explicit type.*gradcomp_jax\.state_shardings"
    ):
        door(mesh, lambda s: jax.reshard(s, NamedSharding(mesh, P())))


def train(pins, steps=4):
    """Losses and the last state, of a state that is placed so before each step, or left as it is."""
    mesh = mesh_of(N)
    state, step = gc.init_state(wide_params(), chain(), mesh), gc.make_train_step(loss, chain(), mesh, donate=False)
    losses = []
    for i in range(steps):
        state = jax.device_put(state, pins[i](state, mesh)) if i in pins else state
        state, metrics = step(state, on(mesh, batch(i)))
        losses.append(float(metrics["loss"]))
    return losses, state


@pytest.mark.slow
def test_arrays_that_are_pinned_between_steps_are_told_of_and_train_the_same() -> None:
    with pytest.warns(UserWarning, match=r"two states in a row arrived replicated.*gradcomp_jax\.state_shardings"):
        pinned = train(dict.fromkeys(range(4), everywhere))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = train({})
        # Once, as after a restore: it is split again, and every step after it is as ever.
        once = train({2: everywhere})
        train({2: right, 3: right})
    for losses, state in (pinned, once):
        assert losses == plain[0]
        jax.tree.map(np.testing.assert_array_equal, state, plain[1])


def test_eager_updates_are_told_of() -> None:
    """One state over again is not another that was moved. A gradient that is refused spares compiling each operation."""
    mesh = mesh_of(N)
    tx, p = gc.unreduced(chain(), mesh), wide_params()
    state = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), jax.eval_shape(tx.init, p))

    def update(state):
        with pytest.raises(ValueError, match="added up over 'data' already"):
            tx.update(p, state, p)

    pinned = jax.device_put(state, everywhere(state, mesh))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            update(pinned)
    with pytest.warns(UserWarning, match=r"two states in a row"):
        update(jax.device_put(state, everywhere(state, mesh)))
