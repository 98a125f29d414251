"""What PowerSGD and Dion are replayed on, and how."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.conformance.environments import exchange_state

from .workers import N, close, mapped

SHAPES = {"bias": (7,), "conv": (3, 3, 4, 12), "left": (20, 12), "right": (20, 12), "tiny": (2, 2), "wide": (8, 30)}
COMPRESSED = ("conv", "left", "right", "wide")


def first_q(rank, seed=0):
    """From the seed, which all workers share: an input."""
    sides = {name: SHAPES[name][-1] for name in COMPRESSED}
    return {
        name: np.asarray(jax.random.normal(jax.random.key(seed), (1, c, rank), jnp.float32))[0]
        for name, c in sides.items()
    }


def steady(seed):
    """Gradients that change little from step to step: of others a power iteration magnifies the smallest rounding."""
    rng = np.random.default_rng(seed)
    part = {k: rng.standard_normal((N, *s)) for k, s in SHAPES.items()}
    return lambda: {k: (g + rng.standard_normal(g.shape) / 4).astype(np.float32) for k, g in part.items()}


def state_of(state):
    """Residuals and Q, by tensor."""
    inner = exchange_state(state)
    kept, warm = (list(map(np.asarray, jax.tree.leaves(of))) for of in (inner.memory, inner.compressor))
    assert len(kept) == len(warm) == len(COMPRESSED)
    return kept, warm


def replayed(tx, draw, single, *whole):
    """Yields the state after each of twenty-two steps, all of whose updates are those of the oracles.

    ``whole`` go on from zero, loosely, because rounding grows from step to step; ``single`` takes each step again from the
    state before it, to rounding.
    """
    state, update = mapped(tx, SHAPES)
    for step in range(22):
        single.resume(*state_of(state))
        gradients = draw()
        updates, state = update(gradients, state)
        updates = jax.tree.map(np.asarray, updates)
        for name in SHAPES:
            assert (updates[name] == updates[name][:1]).all()
        for oracle, tolerance in (*((one, 5e-3) for one in whole), (single, 2e-5)):
            for name, want in oracle.step(gradients).items():
                close(updates[name][0], want, tolerance, f"step {step}, {name}")
        yield state
