"""A transformation and its replay, step by step, on gradients that leave no decision to float rounding."""

import jax
import numpy as np
import optax

import gradcomp_jax as gc
from tests.conformance.environments import exchange_state, rows_of_owners

from .averaging import Averaging, Tree

N, AXIS = 4, "data"
STEPS, SKIPPED = 22, 9
RATE, MOMENTUM = 0.1, 0.9


def normal(rng: np.random.Generator, shapes: dict[str, tuple[int, ...]]) -> Tree:
    """Gradients with dead entries, a row that one worker has nothing in, and rows that nobody has anything in."""
    gradients = {k: rng.standard_normal((N, *s)).astype(np.float32) for k, s in shapes.items()}
    gradients["matrix"][..., 3] = 0
    gradients["kernel"][1, ..., 2] = 0
    flat = gradients["matrix"].reshape(N, -1)
    flat[2, 64:128], flat[:, 128:192] = 0, 0
    return gradients


def wide(rng: np.random.Generator, shapes: dict[str, tuple[int, ...]]) -> Tree:
    """From below the smallest number of a narrow format to above its largest."""
    return {
        k: (g * np.exp(4 * rng.standard_normal(g.shape))).astype(np.float32) for k, g in normal(rng, shapes).items()
    }


def mapped(tx: optax.GradientTransformation, shapes: dict[str, tuple[int, ...]]):
    """State and update of N workers."""
    params = {k: np.zeros(s, np.float32) for k, s in shapes.items()}
    axes = gc.state_axes(jax.eval_shape(tx.init, params))
    state = jax.jit(jax.vmap(tx.init, axis_name=AXIS, in_axes=None, out_axes=axes, axis_size=N))(params)
    return state, jax.jit(jax.vmap(tx.update, axis_name=AXIS, in_axes=(0, axes), out_axes=(0, axes)))


def nothing_is_lost(method: optax.GradientTransformation, shapes: dict[str, tuple[int, ...]]) -> None:
    """The sum of all updates and the mean of what the workers hold make the sum of all mean gradients, in every step."""
    state, update = mapped(method, shapes)
    rng = np.random.default_rng(1)
    missing = {k: np.zeros(s) for k, s in shapes.items()}
    names = [k for k in sorted(shapes) if len(shapes[k]) > 1]
    for step in range(STEPS):
        gradients = normal(rng, shapes)
        updates, state = update(gradients, state)
        memory = dict(zip(names, exchange_state(state).memory[0], strict=True))
        for k, shape in shapes.items():
            missing[k] += gradients[k].astype(np.float64).mean(axis=0) - np.asarray(updates[k], np.float64)[0]
            held = np.zeros(shape)
            if k in memory:
                flat = np.asarray(memory[k].value, np.float64).mean(axis=0).reshape(-1)
                held = flat[: held.size].reshape(shape)
            close(held, missing[k], f"{k}, step {step}")


def replay(method: optax.GradientTransformation, oracle: Averaging, draw=normal, then=lambda mean: mean) -> None:
    """Runs both with momentum SGD after them; compares every worker's every update, and at the end all that is kept.

    Rows of gradients are drawn anew until no decision in them lies where rounding could take it either way. In one step a
    worker has a NaN: nothing arrives, nothing is kept or lost, and the momentum goes on.
    """
    shapes, rng = oracle.shapes, np.random.default_rng(0)
    state, update = mapped(optax.chain(method, optax.sgd(RATE, MOMENTUM)), shapes)
    velocity = {k: np.zeros(s) for k, s in shapes.items()}
    for step in range(STEPS):
        draws = oracle.draws(step)
        gradients = draw(rng, shapes)
        for _ in range(200):
            mean, after, clear = oracle.step(gradients, draws)
            fresh = draw(rng, shapes)
            gradients = {k: np.where(clear[k], g, fresh[k]) for k, g in gradients.items()}
            if all(c.all() for c in clear.values()):
                break
        else:
            raise AssertionError(f"step {step}: rounding decides whatever is drawn")
        if step == SKIPPED:
            gradients["kernel"][1, 0, 0, 0, 0] = np.nan
            mean = {k: np.zeros(s) for k, s in shapes.items()}
        else:
            oracle.kept = after
        velocity = {k: MOMENTUM * velocity[k] + then(mean[k]) for k in shapes}
        updates, state = update(gradients, state)
        for name in shapes:
            want = np.broadcast_to(-RATE * velocity[name], (N, *shapes[name]))
            close(updates[name], want, f"update of {name}, step {step}")
    found = exchange_state(state)
    assert int(found.skipped) == 1
    groups = zip(oracle.groups, oracle.kept, found.memory[:-1], found.server[:-1], strict=True)
    for group, kept, memory, server in groups:
        if group.memory:
            for mark, want in zip(memory, group.segments(kept.workers), strict=True):
                assert want.any()
                close(mark.value, want, "memory")
        else:
            assert not jax.tree.leaves(memory)
        if group.remainder == "server":
            assert kept.owners.any()
            close(rows_of_owners(server.value, group.n), kept.owners, "owners")
        else:
            assert not jax.tree.leaves(server)


def close(got, want: np.ndarray, what: str) -> None:
    """To float32 rounding of some twenty steps of gradients of about 1, or of what is larger."""
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-5 * max(1.0, np.abs(want).max()), err_msg=what)
