"""What wrappers do to weight decay, to clipping, and to parameters of 16 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from gradcomp_jax import per_device
from gradcomp_jax.replicas import MARKED

AXIS, N = "data", 4


def train(tx, params, gradient, steps: int):
    """Every replica's parameters after each step, and ``gradient(step)`` ``[N, ...]`` for each of them."""

    def start(params):
        return per_device.lift(params), per_device.lift(tx.init(params), marked=MARKED)

    axes = gc.state_axes(jax.eval_shape(start, params))
    mapping = {"axis_name": AXIS, "out_axes": axes}
    held = jax.vmap(start, in_axes=None, axis_size=N, **mapping)(params)

    def step(g, params, state):
        params, state = per_device.lower((params, state))
        updates, state = tx.update({"w": g}, state, params)
        return per_device.lift(optax.apply_updates(params, updates)), per_device.lift(state, marked=MARKED)

    update, history = jax.jit(jax.vmap(step, in_axes=(0, *axes), **mapping)), []
    for n in range(steps):
        held = update(gradient(n), *held)
        history.append(np.asarray(held[0]["w"].value.astype(jnp.float32)).reshape(N, -1))
    return history


def decaying(**options):
    return gc.dgc(axis_name=AXIS, density=1.0, momentum=0.0, dtype="float32", **options)


@pytest.mark.parametrize(("every", "delay"), [(1, 0), (3, 2)])
def test_a_sum_of_gradients_decays_as_often_as_its_steps(every: int, delay: int) -> None:
    """Without gradients, each arrival takes every * rate * decay of the weights."""
    rate, decay = 0.1, 0.05
    tx = optax.chain(
        gc.delayed_average(decaying(weight_decay=decay), axis_name=AXIS, delay=delay, every=every), optax.sgd(rate)
    )
    params = {"w": np.ones((4, 6), np.float32)}
    history = train(tx, params, lambda n: np.zeros((N, 4, 6), np.float32), 2 * every + delay)
    arrivals = 2 if every > 1 or delay == 0 else 2 + delay
    want = (1 - every * rate * decay) ** (arrivals if every > 1 else 2 * every + delay)
    np.testing.assert_allclose(history[-1], want, rtol=1e-5)


@pytest.mark.parametrize("every", (1, 3))
def test_a_sum_of_gradients_is_clipped_as_its_steps_are(every: int) -> None:
    """Gradients within the bound are not clipped because several of them are added up."""
    one = np.full((N, 4, 6), 1 / np.sqrt(24), np.float32)  # norm 1
    params = {"w": np.zeros((4, 6), np.float32)}
    moved = []
    for clip in (None, 1.01 * N**0.5, 0.5 * N**0.5):
        tx = optax.chain(
            gc.delayed_average(decaying(clip_norm=clip), axis_name=AXIS, delay=1, every=every), optax.sgd(1.0)
        )
        # All that was added up before the last step has arrived; that step's own gradient is as it is.
        moved.append(train(tx, params, lambda n: jnp.asarray(one), 2 * every + 1)[-1])
    arrived = 2 * every / np.sqrt(24)
    np.testing.assert_allclose(moved[0], -arrived - one[0, 0, 0], rtol=1e-5)
    np.testing.assert_allclose(moved[1], moved[0], rtol=1e-5)
    np.testing.assert_allclose(moved[2], -arrived / 2 - one[0, 0, 0], rtol=1e-5)


def test_accumulated_batches_decay_and_are_clipped_once_with_their_mean() -> None:
    decay, rate = 0.05, 0.1
    for options, want in (({"weight_decay": decay}, 1 - rate * decay), ({"clip_norm": 1.0}, 1.0)):
        tx = gc.accumulate(optax.chain(decaying(**options), optax.sgd(rate)), axis_name=AXIS, every=3)
        history = train(tx, {"w": np.ones((4, 6), np.float32)}, lambda n: np.zeros((N, 4, 6), np.float32), 3)
        np.testing.assert_allclose(history[-1], want, rtol=1e-6)


@pytest.mark.parametrize(
    "around",
    (
        lambda method: gc.elastic_average(method, axis_name=AXIS, every=1),
        lambda method: gc.local_sgd(method, axis_name=AXIS, every=1),
        lambda method: gc.diloco(method, axis_name=AXIS, every=1),
        lambda method: gc.outer_average(method, optax.sgd(0.7), axis_name=AXIS, every=1),
    ),
    ids=("elastic", "local", "diloco", "outer"),
)
def test_differences_of_parameters_do_not_decay(around) -> None:
    tx = optax.chain(optax.sgd(0.1), around(decaying(weight_decay=0.1)))
    with pytest.raises(ValueError, match=r"what crosses is no gradient.*optax.adamw"):
        train(tx, {"w": np.ones((4, 6), np.float32)}, lambda n: np.zeros((N, 4, 6), np.float32), 1)


def test_an_elastic_band_is_not_clipped() -> None:
    tx = optax.chain(optax.sgd(0.1), gc.elastic_average(decaying(clip_norm=1.0), axis_name=AXIS, every=1))
    with pytest.raises(ValueError, match=r"clip_norm is for gradients.*elastic_average.*before the inner optimizer"):
        train(tx, {"w": np.ones((4, 6), np.float32)}, lambda n: np.zeros((N, 4, 6), np.float32), 1)


def dense():
    return gc.dense(axis_name=AXIS)


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_parameters_that_round_corrections_are_refused(dtype) -> None:
    params = {"layer": {"w": np.ones((4, 6), dtype)}}
    for options in ({"delay": 1}, {"delay": 0, "every": 2}):
        with pytest.raises(ValueError, match=r"'layer/w' is b?float16.*float32 master parameters.*compensate=False"):
            gc.delayed_average(dense(), axis_name=AXIS, **options).init(params)
    # Where replicas do not differ, they may have any dtype.
    for options in ({"delay": 2, "compensate": False}, {"delay": 0}):
        jax.eval_shape(gc.delayed_average(gc.dense(axis_name=None), axis_name=None, **options).init, params)


def noise(n: int, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(n), (N, 4, 6)).astype(dtype)


def spread(replicas: np.ndarray) -> float:
    return float(np.linalg.norm(replicas - replicas.mean(axis=0)) / np.linalg.norm(replicas))


def test_replicas_with_gradients_of_16_bits_stay_together() -> None:
    """Float32 masters: once all corrections have arrived, nothing is left but float32's rounding."""
    tx = optax.chain(gc.delayed_average(dense(), axis_name=AXIS, delay=1), optax.sgd(0.01))
    quiet = np.zeros((N, 4, 6), jnp.bfloat16)
    history = train(tx, {"w": np.ones((4, 6), np.float32)}, lambda n: noise(n, jnp.bfloat16) if n < 100 else quiet, 103)
    assert spread(history[50]) > 1e-3
    assert spread(history[-1]) < 1e-6
