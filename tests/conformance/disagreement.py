"""Workers whose gradients differ for good: what arrives of the part that they share, and what their memories hold."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import gradcomp_jax as gc
from gradcomp_jax.per_device import is_per_device

from .environments import AXIS, WORKERS

SHAPE = (16, 64)
STEPS = 400
MOST_GROWTH = 1.5
"""Of a memory from the second quarter to the last; the largest of what settles down slowly is 1.33."""


class Gradients(NamedTuple):
    """What every step's gradient is made of: worker i has ``common + own[i]``, and noise of this size."""

    common: np.ndarray
    own: np.ndarray
    noise: float


def _common() -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.choice([-1.0, 1.0], SHAPE) * rng.uniform(0.5, 1.5, SHAPE)).astype(np.float32)


COMMON = _common()


def spread(size: float = 10.0) -> Gradients:
    """Every entry is disputed, to different degrees."""
    own = size * np.random.default_rng(1).standard_normal((WORKERS, *SHAPE)).astype(np.float32)
    return Gradients(COMMON, own - own.mean(axis=0), 0.0)


def cancelling(size: float = 10.0, *, noise: float = 0.0) -> Gradients:
    """An eighth of the entries is disputed and cancels, bit for bit; the others have the common part alone."""
    disputed = np.random.default_rng(2).random(SHAPE) < 1 / 8
    half = np.where(np.arange(WORKERS) % 2, -size, size)[:, None, None]
    return Gradients(
        np.where(disputed, 0, COMMON).astype(np.float32), np.where(disputed, half, 0).astype(np.float32), noise
    )


KINDS = {
    "spread": spread(),
    "cancelling": cancelling(),
    "noisy": cancelling(noise=0.3),
    # In blocks of eight bits, half of what the workers share is below the step of what they do not, once that adds up.
    "extreme": cancelling(270.0),
    # What all share is a matrix of rank one.
    "rank-one": spread()._replace(common=np.sign(COMMON[:, :1] * COMMON[:1])),
}


def failing(reason: str) -> pytest.MarkDecorator:
    """What is known to fail, by a figure: the test says so as soon as it does not any more."""
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)


class Course(NamedTuple):
    """After each step: ``delivered``, how far the workers' mean parameters have gone against the common gradient, in its
    units; ``kept``, root mean square of all memories; ``apart``, of the parameters around their mean."""

    delivered: np.ndarray
    kept: np.ndarray
    apart: np.ndarray

    def growth(self, of: str = "kept") -> float:
        """The last quarter's mean over the second's: 7/3 of what grows linearly."""
        values, quarter = getattr(self, of), STEPS // 4
        return float(values[-quarter:].mean() / max(values[quarter : 2 * quarter].mean(), 1e-30))


def courses(tx: optax.GradientTransformation) -> dict[str, Course]:
    """Runs a chain that ends in a descent on every kind of gradients, all in one program."""
    stacked = [jnp.float32(np.stack(of)) for of in zip(*KINDS.values(), strict=True)]
    figures = [np.asarray(a[:, 0], np.float64) for a in _program(tx)(*stacked)]
    return {kind: Course(*(a[i] for a in figures)) for i, kind in enumerate(KINDS)}


def _program(tx: optax.GradientTransformation) -> Any:
    update = optax.with_extra_args_support(tx).update

    def one(common, own, noise):
        key = jax.random.fold_in(jax.random.key(0), lax.axis_index(AXIS))
        params = {"w": jnp.zeros(SHAPE)}

        def step(carry, number):
            state, params = carry
            drawn = noise * jax.random.normal(jax.random.fold_in(key, number), SHAPE)
            updates, state = update({"w": common + own + drawn}, state, params)
            params = optax.apply_updates(params, updates)
            mean = lax.pmean(params["w"], AXIS)
            delivered = -jnp.sum(mean * common) / jnp.sum(common * common)
            apart = lax.pmean(jnp.mean((params["w"] - mean) ** 2), AXIS)
            return (state, params), (delivered, lax.pmean(kept(state), AXIS), apart)

        # From the start as what differs by worker: vmap would first try to find out whether it does, and its all-to-all
        # cannot take what does not.
        differs = 0 * lax.axis_index(AXIS)
        state = jax.tree.map(
            lambda x: jax.tree.map(lambda a: a + differs.astype(a.dtype), x) if is_per_device(x) else x,
            tx.init(params),
            is_leaf=is_per_device,
        )
        _, (delivered, squares, apart) = lax.scan(step, (state, params), jnp.arange(STEPS))
        return delivered, jnp.sqrt(squares), jnp.sqrt(apart)

    # Of the tests' programs these are the ones that take longer to run than to compile.
    options = {"xla_backend_optimization_level": 1}
    return jax.jit(jax.vmap(jax.vmap(one, axis_name=AXIS, in_axes=(None, 0, None))), compiler_options=options)


def kept(state: Any) -> jax.Array:
    """Mean square of what a worker's memories and server residuals hold."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, gc.ExchangeState))
    held = jax.tree.leaves([(n.memory, n.server) for n in nodes if isinstance(n, gc.ExchangeState)])
    return sum(jnp.sum(a * a) for a in held) / max(sum(a.size for a in held), 1)
