"""Published methods that are tried beside the package: what they send, keep and agree on."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from benchmarks.adamw.rivals.des_loc import des_loc
from benchmarks.adamw.rivals.dion2 import dion2
from benchmarks.adamw.rivals.ef21_muon import ef21_muon, orthonormal
from benchmarks.adamw.rivals.noloco import noloco
from gradcomp_jax import per_device

pytestmark = [pytest.mark.slow, pytest.mark.benchmarks, pytest.mark.standard_promotion]

AXIS, WORKERS = "data", 4
PARAMS = {"embedding": jnp.ones((6, 8)), "norm": jnp.ones(8), "up": jnp.ones((8, 16)), "down": jnp.ones((16, 8))}
HIDDEN = ("up", "down")
RATE = optax.constant_schedule(0.01)


def gradients(step: int) -> Any:
    """Gradients that bfloat16 holds exactly, so that laws hold exactly too."""
    keys = iter(jax.random.split(jax.random.key(step), len(PARAMS)))
    return {
        name: jax.random.randint(next(keys), (WORKERS, *p.shape), -8, 9).astype(jnp.float32)
        for name, p in PARAMS.items()
    }


def equal_workers(tx: Any, steps: int) -> Any:
    """Yields the gradients, updates and states of a method whose workers have the same parameters."""
    axes = gc.state_axes(jax.eval_shape(tx.init, PARAMS))
    state = jax.vmap(tx.init, in_axes=None, out_axes=axes, axis_name=AXIS, axis_size=WORKERS)(PARAMS)
    update = jax.jit(jax.vmap(tx.update, (0, axes, None), (None, axes), axis_name=AXIS))
    for step in range(steps):
        seen = gradients(step)
        updates, state = update(seen, state, PARAMS)
        yield seen, updates, state


def replicas(tx: Any, steps: int, *, apart: float = 0.0) -> Any:
    """Yields the parameters and states of a method's replicas, which may start apart."""
    params = {
        name: p + apart * jax.random.normal(jax.random.key(len(name)), (WORKERS, *p.shape)) for name, p in PARAMS.items()
    }
    state = jax.vmap(tx.init, axis_name=AXIS)(params)

    def step(seen: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(seen, state, params)
        return optax.apply_updates(params, updates), state

    stepped = jax.jit(jax.vmap(step, axis_name=AXIS))
    for number in range(steps):
        params, state = stepped(gradients(number), state, params)
        yield params, state


def spread(tree: Any) -> float:
    return max(float(jnp.max(jnp.ptp(leaf, axis=0))) for leaf in jax.tree.leaves(tree))


def test_muons_direction_has_singular_values_of_about_one() -> None:
    for shape in ((6, 48), (48, 6)):
        values = np.linalg.svd(orthonormal(jax.random.normal(jax.random.key(0), shape)), compute_uv=False)
        assert values.shape == (6,) and 0.6 < values.min() and values.max() < 1.3


def test_dion2_keeps_what_it_did_not_send_and_moves_the_rows_that_it_sent() -> None:
    decay, seen = 0.5, dict.fromkeys(HIDDEN, 0.0)
    sent: dict[str, Any] = dict.fromkeys(HIDDEN, 0.0)
    for grads, updates, state in equal_workers(dion2(RATE, axis_name=AXIS, fraction=0.25, decay=decay), 4):
        kept = per_device.lower(jax.tree.map(lambda x: x, state.momentum))
        for name in HIDDEN:
            rows = 0 if name == "up" else 1
            moved = np.any(updates[name] != 0, axis=1 - rows)
            assert moved.sum() == 2, "a quarter of eight"
            before = seen[name] + grads[name] - sent[name]
            norms = np.abs(before).sum((0, 2 - rows))
            assert norms[moved].min() >= norms[~moved].max() * (1 - 2**-7), "the largest, as bfloat16 has them"
            sent[name] = sent[name] + (1 - decay) * before * np.expand_dims(moved, (0, 2 - rows))
            seen[name] = seen[name] + grads[name]
            value = state.momentum[name].value.reshape(before.shape)
            np.testing.assert_allclose(sent[name] + value, seen[name], atol=1e-4)
    assert kept.keys() == set(HIDDEN)


def test_ef21_muon_steps_on_the_mean_of_what_was_sent() -> None:
    tx = ef21_muon(RATE, axis_name=AXIS, momentum=0.0, density=1.0, collective="all_gather", dtype="float32")
    for grads, updates, _ in equal_workers(tx, 3):
        # All entries cross, so the estimate is the mean gradient itself.
        mean = jnp.mean(grads["up"], axis=0)
        np.testing.assert_allclose(updates["up"], -0.01 * 2**0.5 * orthonormal(mean), atol=1e-5)
    tx = ef21_muon(RATE, axis_name=AXIS, momentum=0.0, density=0.1, collective="all_gather")
    constant = jax.tree.map(lambda p: jax.random.normal(jax.random.key(3), (WORKERS, *p.shape)), PARAMS)
    axes = gc.state_axes(jax.eval_shape(tx.init, PARAMS))
    state = jax.vmap(tx.init, in_axes=None, out_axes=axes, axis_name=AXIS, axis_size=WORKERS)(PARAMS)
    update = jax.jit(jax.vmap(tx.update, (0, axes, None), (None, axes), axis_name=AXIS))
    for _ in range(15):
        updates, state = update(constant, state, PARAMS)
    aim = -0.01 * 2**0.5 * orthonormal(jnp.mean(constant["up"], axis=0))
    np.testing.assert_allclose(updates["up"], aim, atol=2e-4)


def test_des_loc_averages_each_state_at_its_period() -> None:
    for number, (params, state) in enumerate(replicas(des_loc(0.01, axis_name=AXIS, every=2), 12), 1):
        adam = state.inner[0]
        assert (spread(params) < 1e-6) == (number % 2 == 0), number
        assert (spread(adam.mu) < 1e-6) == (number % 6 == 0), number
        assert (spread(adam.nu) < 1e-6) == (number % 12 == 0), number
        assert spread(state.center) < 1e-6, number


def test_noloco_keeps_the_pairs_sum_and_brings_replicas_together() -> None:
    still = optax.chain(optax.scale(0.0), noloco(axis_name=AXIS, every=2, momentum=0.5, pull=1.0))
    spreads, first = [], None
    for params, state in replicas(still, 40, apart=0.5):
        first = params if first is None else first
        spreads.append(spread(params))
        for name, leaf in params.items():
            np.testing.assert_allclose(leaf.mean(0), first[name].mean(0), atol=1e-5)
    assert spreads[0] == spreads[0 + 0] and spreads[1] < spreads[0] and spreads[-1] < 0.1 * spreads[0]
    moving = optax.chain(optax.sgd(0.01), noloco(axis_name=AXIS, every=2, momentum=0.0, learning_rate=1.0, pull=0.0))
    for number, (params, _) in enumerate(replicas(moving, 4)):
        seen = {name: sum(gradients(i)[name].mean(0) for i in range(number + 1)) for name in PARAMS}
        for name, leaf in params.items():
            np.testing.assert_allclose(leaf.mean(0), PARAMS[name] - 0.01 * seen[name], atol=1e-5)
