"""The outer step in NumPy is that of ``outer_average``, and rounds once an operation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.islands.outer import OuterState, OuterStep


def of_outer_average(step, centre, moves, weights):
    """Centres of ``outer_average`` with one exchange of these moves after the other, on simulated replicas."""
    outer = optax.sgd(step.learning_rate, step.momentum or None, nesterov=step.nesterov)
    method = gc.weighted(gc.dense(axis_name="i"), axis_name="i")
    tx = gc.outer_average(method, outer, axis_name="i", every=1)

    def run(centre, moves, weight):
        state, params, found = tx.init(centre), centre, []
        for move in moves:
            updates, state = tx.update(-move, state, params, weight=weight)
            params = optax.apply_updates(params, updates)
            found.append(state.centre)
        return found

    run = jax.jit(jax.vmap(run, in_axes=(None, 1, 0), axis_name="i"))
    return [np.asarray(c[0]) for c in run(centre, moves, np.float32(weights))]


@pytest.mark.parametrize(
    "step", [OuterStep(0.5, 0.5, True), OuterStep(0.5, 0.5, False), OuterStep(1.0, 0.0), OuterStep(0.25, 0.0)], ids=str
)
@pytest.mark.parametrize("exact", [True, False])
def test_it_is_the_step_of_outer_average(step, exact):
    rng = np.random.default_rng(0)
    if exact:
        # Numbers that no operation rounds: both have to be equal, whatever is contracted.
        centre, moves = rng.integers(-64, 64, 300), rng.integers(-64, 64, (4, 3, 300)) * 4
        weights = [1.0, 2.0, 1.0]
    else:
        centre, moves, weights = rng.normal(size=300), rng.normal(size=(4, 3, 300)), [1.0, 2.5, 0.3]
    centre, moves = centre.astype(np.float32), moves.astype(np.float32)
    expected = of_outer_average(step, jnp.asarray(centre), moves, weights)
    state = step.init(centre)
    for move, wanted in zip(moves, expected, strict=True):
        state = step(state, [(w, np.float32(w) * m) for w, m in zip(weights, move, strict=True)])
        if exact:
            np.testing.assert_array_equal(state.centre, wanted)
        else:
            np.testing.assert_allclose(state.centre, wanted, atol=2e-6)


def test_every_operation_rounds_once():
    """Against the definition in float64, rounded after each operation, for more entries than one slice has."""
    rng, size = np.random.default_rng(1), (1 << 18) + 7
    c, m, a, b = (rng.normal(size=size).astype(np.float32) for _ in range(4))

    def rounded(x):
        return x.astype(np.float32).astype(np.float64)

    weight = float(np.float32(np.float32(1.5) + np.float32(0.7)))
    mu, rate = float(np.float32(0.9)), float(np.float32(-0.7))
    g = rounded(rounded(a.astype(np.float64) + b) / weight)
    new_m = rounded(g + rounded(m.astype(np.float64) * mu))
    move = rounded(g + rounded(new_m * mu))
    new_c = rounded(c + rounded(move * rate))
    before = c.copy(), m.copy()
    state = OuterStep(0.7, 0.9)(OuterState(c, m), [(1.5, a), (0.7, b)])
    np.testing.assert_array_equal(state.momentum, new_m.astype(np.float32))
    np.testing.assert_array_equal(state.centre, new_c.astype(np.float32))
    np.testing.assert_array_equal(before, (c, m))
    again = OuterState.from_bytes(state.to_bytes(), size)
    np.testing.assert_array_equal(again.centre, state.centre)
    np.testing.assert_array_equal(again.momentum, state.momentum)


def test_without_payloads_nothing_moves():
    step = OuterStep(0.7, 0.9)
    state = step.init(np.ones(3, np.float32))
    assert step(state, []) is state
