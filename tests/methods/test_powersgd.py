"""PowerSGD against the best approximation there is."""

import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax.core import by_matrix

from .replay.workers import AXIS, N, mapped


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
