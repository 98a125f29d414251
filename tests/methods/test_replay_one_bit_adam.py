"""1-bit Adam against a replay in float64."""

import numpy as np
import pytest

import gradcomp_jax as gc
from tests.conformance.environments import rows_of_owners

from .replay.signs import OneBitAdam
from .replay.workers import AXIS, N, close, gaussian, replay

SHAPES = {"bias": (7,), "kernel": (3, 3, 4, 5), "matrix": (30, 11)}


@pytest.mark.parametrize(
    ("warm_up", "constants"),
    [(6, {}), (6, {"floor": 0.0}), (1, {}), (6, {"b1": 0.8, "b2": 0.9, "eps": 0.1, "floor": 0.5}), (100, {})],
    ids=["defaults", "no-floor", "one-step", "other-constants", "warm-up-only"],
)
def test_replay(warm_up, constants) -> None:
    """Both stages, the bias corrections (the variance's stops with it), and the residuals of workers and owners.

    A column of the matrix has no gradient in the warm-up and one after it: its v is zero, and the mean of its
    tensor counts.
    """
    tx = gc.one_bit_adam(axis_name=AXIS, warm_up_steps=warm_up, block=32, **constants)
    oracle = OneBitAdam(
        SHAPES, N, block=32, warm_up=warm_up, **({"b1": 0.9, "b2": 0.999, "eps": 1e-8, "floor": 0.1} | constants)
    )
    draws, still = gaussian(SHAPES, 0), []

    def draw():
        gradients = draws()
        if oracle.taken < warm_up:
            gradients["matrix"][:, :, 3] = 0
        return gradients

    class Watched:
        """The oracle, which is asked whether the column moves; `replay` compares the transformation with it."""

        def step(self, gradients):
            update = oracle.step(gradients)
            moves = oracle.taken > warm_up
            still.append(update["matrix"][:, 3].any() == moves and update["matrix"][:, :3].all())
            return update

    state = replay(tx, Watched(), draw, SHAPES)
    assert all(still)
    for name in SHAPES:
        close(state.mean[name], oracle.m[name], message=f"m of {name}")
        close(state.variance[name], oracle.v[name], message=f"v of {name}")
    assert int(state.taken) == 22
    worker = [np.asarray(segment.value) for segment in state.compressed.memory[0]]
    # Owner j has the j-th of N equal runs of rows.
    owners = rows_of_owners(state.compressed.server[0].value, N)
    assert not owners[len(oracle.server) :].any()
    close(np.concatenate(worker, axis=1), oracle.worker, message="residual of the workers")
    close(owners[: len(oracle.server)], oracle.server, message="residual of the owners")
    # No sign hung on rounding, and both residuals are something.
    assert oracle.margin > 1e-6
    assert (oracle.worker.any() and oracle.server.any()) == (warm_up < 22)
