"""DeMo against a NumPy replay."""

import copy

import numpy as np
import pytest

import gradcomp_jax as gc
from tests.conformance.environments import exchange_state

from .replay.frequencies import Demo, cosines
from .replay.workers import AXIS, N, close, gaussian, mapped, replay

SHAPES = {"bias": (7,), "kernel": (3, 3, 4, 5), "matrix": (30, 11)}
SIDES = {"a line": (1, 64), "the longest line": (1, 128), "a chunk": (12, 16), "a square chunk": (16, 16)}


def pair(sides, k, *, signed, collective="all_gather", dtype="float32", momentum=0.9):
    block = sides[0] * sides[1]
    tx = gc.demo(
        axis_name=AXIS,
        density=k / block,
        block=block,
        momentum=momentum,
        signed=signed,
        collective=collective,
        dtype=dtype,
    )
    options = {"sides": sides, "k": k, "momentum": momentum, "two_phase": collective == "two_phase", "dtype": dtype}
    return tx, Demo(SHAPES, N, signed=signed, **options)


def momentum_of(state) -> np.ndarray:
    return np.concatenate([np.asarray(segment.value) for segment in exchange_state(state).memory[0]], axis=1)


def check_memory(state, oracle, tolerance=2e-5) -> None:
    close(momentum_of(state), oracle.m, tolerance, "momentum")
    # Slow frequencies stay, and differ by worker.
    assert np.abs(oracle.m - oracle.m.mean(axis=0)).max() > 0.1


@pytest.mark.parametrize("sides", SIDES.values(), ids=SIDES)
def test_unsigned(sides) -> None:
    """m = beta m + g; the largest frequencies of m cross and leave it; the update is their mean."""
    tx, oracle = pair(sides, 3, signed=False)
    check_memory(replay(tx, oracle, gaussian(SHAPES, 0), SHAPES), oracle)


def test_two_phases() -> None:
    """The owner of a chunk sends the mean's largest frequencies, and keeps what that leaves out."""
    tx, oracle = pair((1, 64), 3, signed=False, collective="two_phase")
    check_memory(replay(tx, oracle, gaussian(SHAPES, 1), SHAPES), oracle)


@pytest.mark.parametrize("momentum", [0.5, 0.999])
def test_signed(momentum) -> None:
    """The update is the sign of the unsigned one, and the momentum is the same."""
    tx, oracle = pair((12, 16), 4, signed=False, momentum=momentum)
    tx = pair((12, 16), 4, signed=True, momentum=momentum)[0]
    state, update = mapped(tx, SHAPES)
    draw, compared, entries = gaussian(SHAPES, 2), 0, 0
    for _ in range(22):
        gradients = draw()
        updates, state = update(gradients, state)
        for name, mean in oracle.step(gradients).items():
            got = np.asarray(updates[name])
            assert (got == got[:1]).all()
            # Nearer to zero than rounding reaches, either sign will do.
            clear = np.abs(mean) > 1e-4 * np.abs(mean).max()
            np.testing.assert_array_equal(got[0][clear], np.sign(mean)[clear])
            compared, entries = compared + clear.sum(), entries + clear.size
    assert compared > 0.99 * entries
    check_memory(state, oracle)


def test_bfloat16_frequencies() -> None:
    """They cross to bfloat16's precision; what rounding takes stays in the momentum, which with the update is exact.

    A cosine transform rounds, and bfloat16 can make a whole unit of it: so each step starts from the state there is.
    """
    tx, oracle = pair((1, 64), 3, signed=False, dtype="bfloat16")
    state, update = mapped(tx, SHAPES)
    draw, half_a_unit, rounded = gaussian(SHAPES, 3), 2.0**-9, []
    for step in range(22):
        gradients = draw()
        oracle.m = momentum_of(state)
        local = np.stack([oracle.join({k: g[i] for k, g in gradients.items()}) for i in range(N)])
        pushed = oracle.beta * oracle.m.astype(np.float64).mean(axis=0) + local.mean(axis=0)
        updates, state = update(gradients, state)
        got = {name: np.asarray(u[0]) for name, u in updates.items()}
        close(oracle.join(got) + momentum_of(state).mean(axis=0), pushed, 1e-6, f"step {step}, what was there")
        exact = exact_twin(oracle).step(gradients)
        for name, want in oracle.step(gradients).items():
            close(got[name], want, 4 * half_a_unit, f"step {step}, {name}")
            rounded.append(np.abs(got[name] - exact[name]).max() / np.abs(want).max())
    assert half_a_unit / 100 < np.max(rounded) < 4 * half_a_unit
    check_memory(state, oracle, 4 * half_a_unit)


def exact_twin(oracle) -> Demo:
    """The same momentum, frequencies in float32."""
    twin = copy.copy(oracle)
    twin.dtype = "float32"
    return twin


@pytest.mark.parametrize("size", [1, 5, 64])
def test_the_formula_is_orthonormal(size) -> None:
    np.testing.assert_allclose(cosines(size) @ cosines(size).T, np.eye(size), atol=1e-12)
