"""A transformation on four workers of one process, step by step against an oracle."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

import gradcomp_jax as gc

N, AXIS = 4, "data"
Shapes = dict[str, tuple[int, ...]]
Tree = dict[str, np.ndarray]


class Oracle(Protocol):
    """``step`` takes ``[N, ...]`` gradients and returns the update."""

    def step(self, gradients: Tree) -> Tree: ...


def mapped(tx: Any, shapes: Shapes) -> tuple[Any, Callable[[Tree, Any], tuple[Tree, Any]]]:
    """State initialised inside the axis, and ``update(gradients, state)`` whose results are stacked by worker."""
    params = {k: np.zeros(s, np.float32) for k, s in shapes.items()}
    axes = gc.state_axes(jax.eval_shape(tx.init, params))
    state = jax.jit(jax.vmap(tx.init, axis_name=AXIS, in_axes=None, out_axes=axes, axis_size=N))(params)
    return state, jax.jit(jax.vmap(tx.update, axis_name=AXIS, in_axes=(0, axes), out_axes=(0, axes)))


def gaussian(shapes: Shapes, seed: int) -> Callable[[], Tree]:
    """Gradients that differ by worker and by step around a part that is the worker's own, with a scale for each tensor."""
    rng = np.random.default_rng(seed)
    steady = {k: rng.standard_normal((N, *s)) for k, s in shapes.items()}
    scale = {k: 2.0**i for i, k in enumerate(sorted(shapes))}

    def draw() -> Tree:
        return {
            k: (scale[k] * (steady[k] / 4 + rng.standard_normal(steady[k].shape))).astype(np.float32) for k in shapes
        }

    return draw


def replay(
    tx: Any,
    oracle: Oracle,
    draw: Callable[[], Tree],
    shapes: Shapes,
    *,
    tolerance: float = 2e-5,
    before: Callable[[Any], None] = lambda state: None,
) -> Any:
    """Twenty-two steps. Every worker's update is bit for bit worker 0's, and that one the oracle's. Returns the state.

    ``before`` sees the state before each step.
    """
    state, update = mapped(tx, shapes)
    moved = set()
    for step in range(22):
        before(state)
        gradients = draw()
        updates, state = update(gradients, state)
        want = oracle.step(gradients)
        for name in shapes:
            got = np.asarray(updates[name])
            assert (got == got[:1]).all(), f"replicas differ at step {step} in {name}"
            close(got[0], want[name], tolerance, f"step {step}, {name}")
            moved |= {name} if want[name].any() else set()
    assert moved == set(shapes)
    return state


def close(got: Any, want: Any, tolerance: float = 2e-5, message: str = "") -> None:
    """Equal up to a part of the largest entry."""
    bound = tolerance * np.abs(want).max()
    np.testing.assert_allclose(np.asarray(got), want, rtol=tolerance, atol=bound, err_msg=message)
