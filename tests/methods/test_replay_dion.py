"""Dion against a replay in float64, the one worker that its mean is, and the polar factor that it is after."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from tests.conformance.environments import exchange_state

from .replay.power_iteration import Dion
from .replay.power_iteration_problem import COMPRESSED, SHAPES, first_q, replayed, state_of, steady
from .replay.workers import AXIS, N, close, mapped


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 4])
def test_replay(rank: int) -> None:
    """Twenty-two steps from zero, loosely, because rounding grows from step to step, and each of them again from the state
    before it, to rounding; and the official code's momenta, of the mean R, which differ by worker and not in their mean."""
    tx, draw = gc.dion(axis_name=AXIS, rank=rank, momentum=0.8, seed=3), steady(rank)
    whole, single = (Dion(SHAPES, N, first_q(rank, 3), momentum=0.8) for _ in range(2))
    official = Dion(SHAPES, N, first_q(rank, 3), momentum=0.8, mean_r=True)
    for state in replayed(tx, draw, single, whole, official):
        for name, kept in zip(COMPRESSED, state_of(state)[0], strict=True):
            kept = kept.reshape(single.kept[name].shape)
            close(kept, single.kept[name], 2e-5, f"momentum of {name}")
            close(kept, whole.kept[name], 5e-3, f"momentum of {name}")
            close(kept.mean(axis=0), official.kept[name].mean(axis=0), 5e-3, f"mean momentum of {name}")
    for name in COMPRESSED:
        assert np.abs(official.kept[name] - whole.kept[name]).max() > 0.1


@pytest.mark.slow
def test_the_workers_are_one_that_sees_the_mean() -> None:
    draw, shapes = steady(5), {name: SHAPES[name] for name in ("bias", "left", "wide")}
    state, update = mapped(gc.dion(axis_name=AXIS, rank=2), shapes)
    alone = gc.dion(axis_name=None, rank=2)
    lone, step = alone.init({name: jnp.zeros(shape) for name, shape in shapes.items()}), jax.jit(alone.update)
    for _ in range(8):
        gradients = {name: g for name, g in draw().items() if name in shapes}
        updates, state = update(gradients, state)
        want, lone = step({name: g.mean(axis=0) for name, g in gradients.items()}, lone)
        for name in shapes:
            close(updates[name][0], want[name], 1e-4, name)
    for mine, other in zip(*(jax.tree.leaves(exchange_state(s).memory) for s in (state, lone)), strict=True):
        close(np.asarray(mine).mean(axis=0).reshape(-1), np.asarray(other).reshape(-1), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(24, 10), (10, 24)])
def test_a_steady_gradient_gives_its_polar_factor(shape: tuple[int, int]) -> None:
    """By the root of fan-out over fan-in, whatever the singular values and however long the gradient is."""
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.standard_normal((n, 3)))[0] for n in shape)
    gradient = jnp.float32(1e6 * (u * [3.0, 1.0, 0.3]) @ v.T)
    tx = gc.dion(axis_name=None, rank=3)
    state, update = tx.init(gradient), jax.jit(tx.update)
    for _ in range(60):
        direction, state = update(gradient, state)
    np.testing.assert_allclose(direction, np.sqrt(shape[1] / shape[0]) * u @ v.T, atol=1e-3)


@pytest.mark.slow
def test_a_skipped_step_leaves_all_as_it_was() -> None:
    tx = gc.dion(axis_name=None, rank=2)
    params = {"w": jnp.zeros((20, 12)), "b": jnp.zeros(7)}
    draw, update = np.random.default_rng(1), jax.jit(tx.update)
    gradients = [jax.tree.map(lambda p: jnp.float32(draw.standard_normal(p.shape)), params) for _ in range(4)]
    plain = skipping = tx.init(params)
    for number, gradient in enumerate(gradients):
        if number == 2:
            bad = {"w": gradient["w"].at[3, 3].set(jnp.inf), "b": gradient["b"]}
            updates, skipping = update(bad, skipping)
            assert not any(np.asarray(u).any() for u in updates.values())
        (want, plain), (got, skipping) = update(gradient, plain), update(gradient, skipping)
        for name in params:
            np.testing.assert_array_equal(got[name], want[name])
    assert int(exchange_state(skipping).skipped) == 1


@pytest.mark.slow
def test_what_goes_dense_is_the_others() -> None:
    """A matrix by the mask, a vector, and what is too small at any rank; an identity leaves their means."""
    shapes = {"embed": (20, 12), "bias": (7,), "tiny": (2, 2), "w": (20, 12)}
    tx = gc.dion(axis_name=AXIS, others=optax.identity(), mask=gc.masks.without("embed|tiny"))
    state, update = mapped(tx, shapes)
    rng = np.random.default_rng(2)
    gradient = {name: rng.standard_normal((N, *shape)).astype(np.float32) for name, shape in shapes.items()}
    updates, state = update(gradient, state)
    for name in ("embed", "bias", "tiny"):
        close(updates[name][0], gradient[name].mean(axis=0))
    # Of rank 7, the highest at which the factors of 20 x 12 are smaller.
    assert np.linalg.matrix_rank(updates["w"][0], tol=1e-3) == 7
    alone = jax.eval_shape(gc.dion(axis_name=None).init, {"tiny": jnp.zeros((2, 2))})
    assert not jax.tree.leaves(exchange_state(alone).memory)


def test_what_it_refuses() -> None:
    for momentum in (1.0, -0.1):
        with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\)"):
            gc.dion(axis_name=AXIS, momentum=momentum)
    with pytest.raises(TypeError, match="momentum must be a Python number"):
        gc.dion(axis_name=AXIS, momentum=jnp.float32(0.9))
    with pytest.raises(ValueError, match="rank must be an integer of at least 1, got 0"):
        gc.dion(axis_name=AXIS, rank=0)
    with pytest.raises(ValueError, match=r"Dion's updates are directions.*leave it out"):
        gc.rate_weighted(gc.dion(axis_name=None), optax.constant_schedule(0.1)).init({"w": jnp.zeros((20, 12))})
