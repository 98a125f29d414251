"""Published methods that are tried beside the package: what they send, keep and agree on."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from benchmarks.adamw.rivals import RIVALS, table
from benchmarks.adamw.rivals.des_loc import des_loc
from benchmarks.adamw.rivals.dion2 import dion2
from benchmarks.adamw.rivals.ef21_muon import ef21_muon, orthonormal
from benchmarks.adamw.rivals.noloco import noloco
from benchmarks.adamw.rows import ROWS
from benchmarks.adamw.runs import Results
from benchmarks.adamw.task import TASKS
from benchmarks.adamw.train import Run

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
        name: p + apart * jax.random.normal(jax.random.key(len(name)), (WORKERS, *p.shape))
        for name, p in PARAMS.items()
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
        assert values.shape == (6,) and values.min() > 0.6 and values.max() < 1.3


def test_dion2_keeps_what_it_did_not_send_and_moves_the_rows_that_it_sent() -> None:
    decay = 0.5
    seen: dict[str, Any] = dict.fromkeys(HIDDEN, 0.0)
    sent: dict[str, Any] = dict.fromkeys(HIDDEN, 0.0)
    for grads, updates, state in equal_workers(dion2(RATE, axis_name=AXIS, fraction=0.25, decay=decay), 4):
        for name in HIDDEN:
            # Rows of the shorter side: those of "up", and the columns of "down".
            other = 1 if name == "up" else 0
            moved = np.any(updates[name] != 0, axis=other)
            before = seen[name] + grads[name] - sent[name]
            norms = np.abs(before).sum((0, 1 + other))
            # Two of eight, the largest as bfloat16 has them.
            assert moved.sum() == 2 and norms[moved].min() >= norms[~moved].max() * (1 - 2**-7)
            sent[name] = sent[name] + (1 - decay) * before * np.expand_dims(moved, (0, 1 + other))
            seen[name] = seen[name] + grads[name]
            kept = state.momentum[name].value.reshape(before.shape)
            np.testing.assert_allclose(sent[name] + kept, seen[name], atol=1e-4)


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


def test_des_loc_sends_the_moments_in_some_turns_only() -> None:
    mesh = jax.make_mesh((WORKERS,), (AXIS,), devices=jax.devices()[:WORKERS])
    lowered = gc.lower_update(PARAMS, des_loc(0.01, axis_name=AXIS, every=5), mesh, replicas=True)
    none, one, two, three = (gc.wire_bytes(lowered.compile(), branch=branch).sent for branch in range(4))
    assert none == 0 < one
    np.testing.assert_allclose((two, three), (2 * one, 3 * one), rtol=0.05)


def test_noloco_keeps_the_pairs_sum_and_brings_replicas_together() -> None:
    still = optax.chain(optax.scale(0.0), noloco(axis_name=AXIS, every=2))
    stood = [params for params, _ in replicas(still, 40, apart=0.5)]
    for name in PARAMS:
        means = [params[name].mean(0) for params in stood]
        np.testing.assert_allclose(means, np.broadcast_to(means[0], np.shape(means)), atol=1e-5)
    # The first step is no turn.
    assert spread(stood[1]) < spread(stood[0]) and spread(stood[-1]) < 0.1 * spread(stood[0])
    moving = optax.chain(optax.sgd(0.01), noloco(axis_name=AXIS, every=2, momentum=0.0, learning_rate=1.0, pull=0.0))
    for number, (params, _) in enumerate(replicas(moving, 4)):
        seen = {name: sum(gradients(i)[name].mean(0) for i in range(number + 1)) for name in PARAMS}
        for name, leaf in params.items():
            np.testing.assert_allclose(leaf.mean(0), PARAMS[name] - 0.01 * seen[name], atol=1e-5)


def test_the_table_has_the_best_row_that_sends_no_more() -> None:
    task = TASKS["65k-1"]
    losses = {"dense": 2.0, "int4": 2.02, "sparse_adamw, 0.02": 2.1, "NoLoCo every 54": 2.5}
    runs = {}
    for name, loss in losses.items():
        for rate in (ROWS | RIVALS)[name].rates[1:4]:
            run = Run(name, rate, task.tuned_at, 0)
            # The middle one is the best.
            other = 0.0 if rate == 4e-3 else 0.1
            runs[run.name] = {"run": dataclasses.asdict(run), "validation": loss + other, "test": loss + other}
    found = Results(task, runs)
    fewer = {"dense": 0.5, "int4": 4.0, "sparse_adamw, 0.02": 46.0, "NoLoCo every 54": 40.0}
    *_, line = table.table(found.of(RIVALS), found.of(ROWS), fewer).splitlines()
    said = [cell.strip() for cell in line.strip("|").split("|")]
    rate = "0.004 of 0.002, 0.004, 0.008"
    assert said == ["NoLoCo every 54", "40x", rate, "+25.00%", "sparse_adamw, 0.02", "46x", "+5.00%"]
