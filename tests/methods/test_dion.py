"""Dion against the polar factor that it is after, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc

from .replay.workers import AXIS


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
