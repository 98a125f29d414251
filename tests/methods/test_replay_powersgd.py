"""PowerSGD against a replay in float64, and against the best approximation there is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax.transforms import by_matrix
from tests.conformance.environments import exchange_state

from .replay.power_iteration import PowerSgd
from .replay.workers import AXIS, N, close, mapped

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


def check_state(state, oracle, tolerance, *, mean=False) -> None:
    for name, e, q in zip(COMPRESSED, *state_of(state), strict=True):
        mine, want = np.asarray(e).reshape(oracle.e[name].shape), oracle.e[name]
        assert np.abs(want).max() > 0.1
        if mean:
            mine, want = mine.mean(axis=0), want.mean(axis=0)
        close(mine, want, tolerance, f"residual of {name}")
        # Each column is kept at a length where nothing underflows.
        close(q[0], oracle.q[name] / np.abs(oracle.q[name]).max(axis=0), tolerance, f"Q of {name}")


@pytest.mark.parametrize("rank", [1, 4])
def test_replay(rank) -> None:
    """M = g + e; P = orth(mean(M Q)); Q = mean(M^T P); the update is P Q^T: twenty-two steps from zero, loosely, because
    rounding grows from step to step, and each of them again from the state before it, to rounding."""
    tx, draw = gc.powersgd(axis_name=AXIS, rank=rank, seed=3), steady(rank)
    whole, single = (PowerSgd(SHAPES, N, first_q(rank, 3)) for _ in range(2))
    paper = PowerSgd(SHAPES, N, first_q(rank, 3), mean_q=True)
    state, update = mapped(tx, SHAPES)
    for step in range(22):
        single.resume(*state_of(state))
        gradients = draw()
        updates, state = update(gradients, state)
        updates = jax.tree.map(np.asarray, updates)
        for name in SHAPES:
            assert (updates[name] == updates[name][:1]).all()
        for oracle, tolerance in ((whole, 5e-3), (paper, 5e-3), (single, 2e-5)):
            for name, want in oracle.step(gradients).items():
                close(updates[name][0], want, tolerance, f"step {step}, {name}")
        check_state(state, single, 2e-5)
    check_state(state, whole, 5e-3)
    # The paper's residual, of the mean Q, differs by what the workers' projections differ: not in its mean.
    check_state(state, paper, 5e-3, mean=True)
    for name in COMPRESSED:
        assert np.abs(paper.e[name] - whole.e[name]).max() > 0.1


def relative_error(update, matrix) -> float:
    return float(np.linalg.norm(np.asarray(update, np.float64) - matrix) / np.linalg.norm(matrix))


@pytest.mark.parametrize("rank", [1, 4])
def test_the_warm_start_finds_the_best_approximation(rank) -> None:
    """Ten steps of one gradient without a residual end within 1% of the truncated SVD; the first is far from it."""
    rng = np.random.default_rng(rank)
    left, right = (np.linalg.qr(rng.standard_normal((n, 24)))[0] for n in (40, 24))
    matrix = (left * 0.75 ** np.arange(24)) @ right.T
    best = np.sqrt((0.75 ** (2 * np.arange(rank, 24))).sum() / (0.75 ** (2 * np.arange(24))).sum())
    policy = by_matrix(
        lambda rows, columns: gc.compressors.low_rank(rank, (rows, columns)), dense=gc.compressors.dense()
    )
    state, update = mapped(gc.exchange(policy, axis_name=AXIS, memory=gc.memory.none()), {"w": (40, 24)})
    # Workers differ; their mean is the matrix.
    noise = rng.standard_normal((N, 40, 24)) / 10
    gradients = {"w": (matrix + noise - noise.mean(axis=0)).astype(np.float32)}
    errors = []
    for _ in range(10):
        updates, state = update(gradients, state)
        errors.append(relative_error(updates["w"][0], matrix))
    assert errors[0] > 1.05 * best
    assert best * (1 - 1e-4) < errors[-1] < 1.01 * best


@pytest.mark.parametrize("rank", [1, 4])
def test_a_mean_of_that_rank_is_reproduced(rank) -> None:
    """With the residual, from the first step on, though no worker's own gradient has that rank."""
    rng = np.random.default_rng(rank)
    matrix = rng.standard_normal((20, rank)) @ rng.standard_normal((rank, 12))
    noise = rng.standard_normal((N, 20, 12))
    gradients = {"w": (matrix + noise - noise.mean(axis=0)).astype(np.float32)}
    state, update = mapped(gc.powersgd(axis_name=AXIS, rank=rank), {"w": (20, 12)})
    for _ in range(10):
        updates, state = update(gradients, state)
        assert relative_error(updates["w"][0], matrix) < 1e-5
