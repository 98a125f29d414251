"""1-bit Adam of tensors, rows and entries without a gradient in the warm-up: they move as their twins do."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import gradcomp_jax as gc
from tests.conformance.environments import AXIS, vmapped

N, WARM_UP, STEPS = 4, 8, 60
SHAPES = {
    "late": (160, 128),  # more than is looked at
    "twin": (160, 128),
    "late_rows": (160, 128),
    "rows": (16, 128),
    "late_bias": (40,),
    "twin_bias": (40,),
    "still": (8, 256),
}
slow = pytest.mark.slow


def trained(first: float = 1.0, **options: Any) -> tuple[dict[str, np.ndarray], Any]:
    """All updates by leaf ``[steps, *shape]``, and the last state; ``first`` scales the late ones' first gradient."""
    tx = gc.one_bit_adam(axis_name=AXIS, warm_up_steps=WARM_UP, **options)
    params = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    (state, update), rng = vmapped(tx, params, N), np.random.default_rng(0)
    seen: dict[str, list[np.ndarray]] = {name: [] for name in SHAPES}
    for step in range(STEPS):
        g = {name: rng.normal(0.3, 1.0, size=(N, *s)).astype(np.float32) for name, s in SHAPES.items()}
        g["still"][:] = 0
        for name in ("late", "late_bias"):
            g[name] *= 0.0 if step < WARM_UP else first if step == WARM_UP else 1.0
        g["rows"][:, 4:8] *= step >= WARM_UP
        g["late_rows"] *= (step >= WARM_UP) * (np.arange(160) % 5 == 2)[:, None]
        moved, state = update(g, state, params)
        for name, value in moved.items():
            assert (np.asarray(value) == np.asarray(value)[:1]).all(), "workers differ"
            seen[name].append(np.asarray(value)[0])
    return {name: np.stack(values) for name, values in seen.items()}, state


def size(updates: np.ndarray) -> float:
    """The root mean square of updates, of the last half of the run."""
    return float(np.sqrt(np.mean(np.square(updates[STEPS // 2 :], dtype=np.float64))))


@pytest.mark.parametrize("floor", (0.1, pytest.param(0.0, marks=slow)))
def test_late_tensors_and_rows_move_as_far_as_their_twins(floor: float) -> None:
    updates, state = trained(floor=floor)
    for late, twin in (("late", "twin"), ("late_bias", "twin_bias")):
        assert not updates[late][:WARM_UP].any()
        assert updates[late][WARM_UP].all(), "it begins with its first gradient"
        assert 0.4 < size(updates[late]) / size(updates[twin]) < 2.5
        # In the direction of the gradient, whose mean is above zero.
        assert updates[late][STEPS // 2 :].mean() > 0.2
    few = updates["late_rows"][:, 2::5]
    assert 0.4 < size(few) / size(updates["twin"]) < 2.5, size(few) / size(updates["twin"])
    rows = size(updates["rows"][:, 4:8]) / size(updates["rows"][:, 8:])
    assert 0.5 < rows < 2
    assert not updates["still"].any() and np.isfinite(np.concatenate([u.reshape(-1) for u in updates.values()])).all()
    # v is that of the warm-up.
    variance = {name: np.asarray(v) for name, v in state.variance.items()}
    assert (variance["twin"] > 0).all() and not variance["late"].any() and not variance["rows"][4:8].any()


@pytest.mark.parametrize("first", (1e-12, pytest.param(1e-25, marks=slow)))
def test_a_first_gradient_that_is_next_to_nothing_makes_no_large_step(first: float) -> None:
    updates, _ = trained(first)
    for name in ("late", "late_bias"):
        each = np.sqrt(np.mean(np.square(updates[name]), axis=tuple(range(1, updates[name].ndim))))
        assert each.max() < 1.01 and size(updates[name]) > 0.2


@slow
def test_a_shard_of_a_worker_may_be_late_too() -> None:
    """Inside a hierarchy each device has its part of a tensor, and where varying-ness is tracked they may differ."""
    mesh = jax.make_mesh((2, 2), ("outer", "inner"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    inside = gc.one_bit_adam(axis_name="outer", warm_up_steps=2)
    tx = gc.hierarchical(inside, axis_name="outer", inner_axis_name="inner")
    axes = ("outer", "inner")
    params = {name: np.zeros((16, 128), np.float32) for name in ("w", "seen")}
    state = gc.init_state(params, tx, mesh, axis_name=axes)

    def loss(p: Any, batch: Any) -> Any:
        return (p["w"] * batch[0]).sum() + p["seen"].sum()

    step = gc.make_train_step(loss, tx, mesh, axis_name=axes)
    batch = np.random.default_rng(0).normal(1.0, 0.1, size=(4, 16, 128)).astype(np.float32)
    half = batch * (np.arange(16) < 8)[:, None].astype(np.float32)
    before = [np.asarray(state.params["w"])]
    for i in range(6):
        state, _ = step(state, half if i < 2 else batch)
        before.append(np.asarray(state.params["w"]))
    moved = np.diff(before, axis=0)
    assert not moved[:2, 8:].any() and (np.abs(moved[-1]) > 0.1).all() and np.abs(moved).max() < 3
