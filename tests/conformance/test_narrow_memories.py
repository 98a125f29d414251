"""Memories narrower than float32: nothing is lost but what rounding says, and a skipped step changes no bit."""

import functools
import inspect
from typing import Any

import jax
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax.memory.narrow import is_narrow, values_of
from gradcomp_jax.methods.registry import METHODS
from gradcomp_jax.transforms.frozen_adam import FrozenAdamState
from tests.methods.replay.power_iteration import low_rank_step

from .environments import AXIS, environment, exchange_state, found_in

WORKERS, SHAPE = 4, (64, 32)
STEPS = 5
SMALL = {"density": 1 / 16, "block": 64}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dgc": ("int8", SMALL),
    "topk_sgd": ("float8_e4m3fn", SMALL),
    "one_bit_sgd": ("int8", {}),
    "block_quantized": ("bfloat16", {"block": 64}),
    "one_bit_adam": ("int8", {"block": 64, "warm_up_steps": 2}),
    "powersgd": ("float8_e4m3fn", {"rank": 2}),
    "dion": ("int8", {"rank": 2}),
    "demo": ("int8", {"density": 1 / 16, "block": 256, "signed": False}),
}
"""A memory of each kind, and each dtype: rounding knows nothing of the method."""

QUICK = ("dgc",)

each_case = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES]
)


@functools.cache
def world_of(name: str):
    dtype, options = CASES[name]
    return environment("vmap", METHODS[name].build(axis_name=AXIS, memory_dtype=dtype, **options), WORKERS)


def gradient_of(seed: int, value: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    drawn = rng.standard_normal((WORKERS, *SHAPE)) * rng.choice([1e-3, 1.0, 30.0], (WORKERS, *SHAPE))
    return {"w": (value * drawn).astype(np.float32)}


def params() -> dict[str, np.ndarray]:
    return {"w": np.zeros(SHAPE, np.float32)}


def wide(node: Any) -> tuple[np.ndarray, np.ndarray]:
    """What workers' rows stand for, ``[workers, rows, block]``, and a bound on the step of the grid around each entry."""
    values = np.asarray(values_of(node).value).astype(np.float64)
    if not is_narrow(node):
        return values, np.abs(values) * 2.0**-7
    scale = np.asarray(node.scale.value, np.float64)
    unit = np.repeat(scale, values.shape[2] // scale.shape[2], axis=2)
    integer = np.issubdtype(np.asarray(node.values.value).dtype, np.integer)
    return values * unit, unit if integer else np.maximum(np.abs(values) / 8, 2.0**-9) * unit


def kept_of(state: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The mean of what workers keep with what owners do, the largest rounding of that, and the workers' velocities."""
    exchange = exchange_state(state)
    memory = next(m for of in exchange.memory for m in of)
    velocity = wide(memory.velocity)[0].reshape(WORKERS, -1) if isinstance(memory, gc.memory.Momentum) else None
    values, step = wide(getattr(memory, "accumulated", memory))
    mean, bound = (x.reshape(WORKERS, -1).mean(axis=0) for x in (values, step))
    for server in filter(jax.tree.leaves, exchange.server):
        mark = values_of(server)
        dealt = bool(mark.returns and mark.returns.dealt)
        rows = [x.swapaxes(0, 1).reshape(-1, x.shape[2])[: mark.rows] for x in wide(server)]
        owned = [(x.T if dealt else x).reshape(-1)[: mean.size] for x in rows]
        mean, bound = mean + owned[0], bound + owned[1]
    return mean, bound, velocity


def laid(name: str, x: np.ndarray) -> np.ndarray:
    """A leaf, or the workers' stacked, as memories lie: ``[..., entries]``."""
    columns = np.moveaxis(x, -1, -2) if name == "one_bit_sgd" else x
    return columns.reshape(*x.shape[:-2], -1).astype(np.float64)


@each_case
def test_what_is_sent_and_kept_is_what_was_seen_but_for_one_step_of_the_grid(name: str) -> None:
    world, state = world_of(name), None
    state = world.init(params())
    rounded = False
    for seed in range(STEPS):
        gradient = gradient_of(seed)
        updates, new = world.update(gradient, state, params())
        assert int(exchange_state(new).skipped) == 0
        before, _, velocity = kept_of(state)
        after, bound, _ = kept_of(new)
        pushed = laid(name, gradient["w"])
        sent = laid(name, np.asarray(updates["w"])[0])
        if velocity is not None:
            pushed = 0.9 * velocity + pushed
        if name == "demo":
            before = 0.999 * before
        if name == "one_bit_adam":
            was, now = (laid(name, np.asarray(found_in(s, FrozenAdamState).mean["w"])) for s in (state, new))
            pushed, sent = 0.9 * was + 0.1 * pushed, now
        if name == "dion":
            # A direction is not what was sent: that is a twentieth of the mean momentum's part in the span of P.
            seen = (pushed.mean(axis=0) + before).reshape(SHAPE)
            p, r = low_rank_step(seen, exchange_state(state).compressor[0][0][0])
            sent = (0.05 * p @ r.T).reshape(-1)
        off = sent + after - pushed.mean(axis=0) - before
        tolerance = 4e-6 * max(np.abs(pushed).max(), np.abs(before).max() * WORKERS)
        assert (np.abs(off) <= bound + tolerance).all()
        rounded |= bool((np.abs(off) > tolerance).any())
        state = new
    assert rounded, "nothing was rounded"
    # No side is preferred: of all entries as many are off to either.
    assert abs(np.sign(off[bound > 0]).mean()) < 6 / np.sqrt(max((bound > 0).sum(), 1))


@each_case
def test_a_skipped_step_changes_no_bit_and_zeros_stay_zeros(name: str) -> None:
    world = world_of(name)
    start = world.init(params())
    _, zero = world.update(gradient_of(0, 0.0), start, params())
    assert not any(np.asarray(x, np.float32).any() for x in jax.tree.leaves(exchange_state(zero).memory))
    _, state = world.update(gradient_of(1), zero, params())
    bad = gradient_of(2)
    bad["w"][1, 3, 5] = np.nan
    _, after = world.update(bad, state, params())
    old, new = exchange_state(state), exchange_state(after)
    assert int(new.skipped) == int(old.skipped) + 1
    for a, b in zip(jax.tree.leaves((old.memory, old.server)), jax.tree.leaves((new.memory, new.server)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert a.dtype == b.dtype and (a.dtype != np.float32 or a.shape[2] < 16), "float32 values are in the state"


@each_case
def test_a_scale_that_is_not_finite_costs_one_step(name: str) -> None:
    """As an entry that is not finite does: the step gives it up, and the next one goes on."""
    world, dtype = world_of(name), CASES[name][0]
    if dtype == "bfloat16":
        pytest.skip("has no scale")
    _, state = world.update(gradient_of(1), world.init(params()), params())
    _, state = world.update(gradient_of(1), state, params())
    _, state = world.update(gradient_of(1), state, params())

    def spoilt(node: Any) -> Any:
        if not is_narrow(node):
            return node
        scale = np.array(node.scale.value)
        scale[2, 0] = np.inf
        return node._replace(scale=jax.tree.map(lambda _: scale, node.scale))

    bad = jax.tree.map(spoilt, state, is_leaf=is_narrow)
    _, after = world.update(gradient_of(2), bad, params())
    assert int(exchange_state(after).skipped) == int(exchange_state(state).skipped) + 1
    updates, last = world.update(gradient_of(3), after, params())
    assert int(exchange_state(last).skipped) == int(exchange_state(after).skipped)
    assert np.asarray(updates["w"]).any()
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(exchange_state(after).memory))


@pytest.mark.slow
def test_a_scale_that_is_not_finite_is_reset() -> None:
    world = world_of("topk_sgd")
    _, state = world.update(gradient_of(1), world.init(params()), params())
    scale = np.array(state.memory[0][0].scale.value)
    scale[2, 0] = np.nan
    mark = state.memory[0][0]._replace(scale=jax.tree.map(lambda _: scale, state.memory[0][0].scale))
    mended, count = gc.reset_nonfinite(state._replace(memory=((mark,), *state.memory[1:])))
    assert count == 1
    _, after = world.update(gradient_of(3), mended, params())
    assert int(after.skipped) == 0
    scale[2, 0] = 0
    np.testing.assert_array_equal(mended.memory[0][0].scale.value, scale)


def test_every_method_with_a_memory_takes_its_dtype() -> None:
    kept = {method.make.__name__ for method in METHODS.values() if method.kept in ("residual", "momentum")}
    # EF21's is an estimate.
    for name in kept | {"eden"}:
        assert "memory_dtype" in inspect.signature(getattr(gc, name)).parameters, name
    for dtype in ("float16", "int4", "nothing"):
        with pytest.raises(ValueError, match=f"dtype of a memory must be one of 'float32'.*got '{dtype}'"):
            gc.topk_sgd(axis_name=None, memory_dtype=dtype)
    for make in (gc.fp8, gc.block_quantized, gc.random_k, gc.eden):
        with pytest.raises(ValueError, match=r"error_feedback=False keeps nothing: leave memory_dtype out"):
            make(axis_name=None, error_feedback=False, memory_dtype="int8")


def test_a_state_of_another_dtype_is_refused() -> None:
    wanted, other = (gc.topk_sgd(axis_name=None, memory_dtype=dtype) for dtype in ("int8", "bfloat16"))
    for a, b, found in ((wanted, other, "bfloat16"), (other, wanted, "int8")):
        state = jax.eval_shape(b.init, params())
        with pytest.raises(ValueError, match=f"memories are {found} in this state.*with the same dtype"):
            jax.eval_shape(a.update, params(), state)
