"""Finite gradients that are too large to be added up: skipped together, like infinities; and those just below."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax.compressors.base import largest_of
from tests.marks import slow_but

from .environments import AXIS, WORKERS, environment, exchange_state
from .methods import FEW, KEEP, METHODS
from .test_conformance import WHOLE, built, gradients, parameters

each_method = pytest.mark.parametrize("method", slow_but(FEW, WHOLE))
keeping = pytest.mark.parametrize("method", slow_but((*KEEP, "terngrad", "dgc-whole-tree"), WHOLE))


def kept(state: Any) -> list[np.ndarray]:
    """All that a method keeps but its counters."""
    return [np.asarray(a) for a in jax.tree.leaves(state) if jnp.issubdtype(a.dtype, jnp.floating)]


@each_method
@pytest.mark.parametrize("everybody", (False, True))
def test_what_a_sum_could_not_hold_is_skipped_on_every_worker(method: str, everybody: bool) -> None:
    _, world = built(method, "vmap")
    params, leaf = parameters(), ("matrix", "bias")[len(method) % 2]
    _, state = world.update(gradients("normal", 7), world.init(params), params)
    bad = gradients("normal", 8)
    if everybody:
        bad[leaf] = np.full_like(bad[leaf], 1e38)
    else:
        place = (5, 10, 3)[: bad[leaf].ndim]
        bad[leaf][place] = -1e38
    # Clipped to 1e6, as this one does, the gradient is a usual one.
    skips = method != "dgc"
    updates, after = world.update(bad, state, params)
    old, new = exchange_state(state), exchange_state(after)
    assert int(new.skipped) == int(old.skipped) + skips
    for name, value in updates.items():
        assert np.isfinite(np.asarray(value, np.float32)).all()
        assert not (skips and np.asarray(value, np.float32).any()), name
    for a, b in zip(kept((old.memory, old.server)), kept((new.memory, new.server)), strict=True):
        assert np.isfinite(b).all()
        assert not skips or (a == b).all()
    updates, _ = world.update(gradients("normal", 9), after, params)
    assert np.asarray(updates["matrix"]).any(), "the exchange did not recover"


@keeping
def test_whatever_is_kept_stays_finite(method: str) -> None:
    """Gradients up to the limit, of one sign and of both, step after step: taken or skipped, nothing overflows."""
    _, world = built(method, "vmap")
    params = parameters()
    state, below = world.init(params), (0.99, 2.0**-14, 2.0**-30)[len(method) % 3]
    for step in range(4):
        rng = np.random.default_rng(step)
        values = [-1.0, 1.0] if step % 2 else [1.0]
        size = np.float32(below * largest_of(WORKERS))
        gradient = {k: np.asarray(size * rng.choice(values, (WORKERS, *p.shape)), p.dtype) for k, p in params.items()}
        updates, state = world.update(gradient, state, params)
        for value in (*jax.tree.leaves(updates), *kept(state)):
            assert np.isfinite(np.asarray(value, np.float32)).all(), f"step {step}"


@pytest.mark.parametrize("collective", ("all_gather", "two_phase", "all_reduce"))
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
def test_the_largest_that_can_be_added_up_is(collective: str, dtype: Any) -> None:
    """A mean of numbers at the limit is that number, and a tenth more is skipped."""
    tx = gc.dense(axis_name=AXIS, dtype=dtype, collective=collective)
    update = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name=AXIS))
    for factor, taken in ((0.9, True), (1.1, False)):
        value = np.float32(factor * largest_of(WORKERS))
        mean, state = update(np.full((WORKERS, 30, 50), value))
        np.testing.assert_allclose(mean, value if taken else 0.0, rtol=2**-8)
        assert (np.asarray(state.skipped) == (not taken)).all()


def test_averaged_leaves_pass_through_as_they_are_unless_they_are_not_finite() -> None:
    tx = gc.exchange(gc.by_path("own", "averaged", otherwise="dense"), axis_name=AXIS)
    update = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name=AXIS))
    for value, skipped in ((1e38, 0), (np.inf, 1)):
        tree = {"own": np.full((WORKERS, 2, 3), value, np.float32), "rest": np.ones((WORKERS, 5), np.float32)}
        updates, state = update(tree)
        np.testing.assert_array_equal(updates["own"], 0.0 if skipped else np.float32(value))
        np.testing.assert_array_equal(updates["rest"], 1.0 - skipped)
        assert (np.asarray(state.skipped) == skipped).all()


def test_an_owners_residual_that_grows_too_large_is_seen() -> None:
    """What only the owner has: its sum, with what it kept, is too large for float32, though every payload is not."""
    tx = gc.exchange(
        gc.compressors.topk(1 / 4, block=4, dtype=jnp.float32),
        axis_name=AXIS,
        collective=gc.collectives.TwoPhase("server"),
    )
    params = {"w": np.zeros((4, WORKERS), np.float32)}
    world = environment("vmap", tx)
    state = world.init(params)
    full = jax.tree.map(lambda a: np.full_like(a, 3e38) if a.dtype == jnp.float32 else a, state.server)
    gradient = {"w": np.full((WORKERS, 4, WORKERS), 1e36, np.float32)}
    updates, after = world.update(gradient, state._replace(server=full), params)
    assert int(after.skipped) == 1
    assert not np.asarray(updates["w"]).any()
    # What would have every later step skipped is given up, and training goes on.
    assert not any(x.any() for x in kept(after.server))
    updates, last = world.update(gradient, after, params)
    assert int(last.skipped) == 1 and np.asarray(updates["w"]).any()


def at_the_limit(kind: str, step: int) -> Any:
    """Gradients as large as an exchange takes, or large in one entry, which a block's sum then has."""
    size = np.float32(0.95 * largest_of(WORKERS))
    gradient = gradients("normal", step)
    for leaf in gradient.values():
        if kind == "everywhere":
            leaf[...] = size
        elif leaf[0].size:
            leaf[0].reshape(-1)[0] = size
    return gradient


@keeping
def test_training_goes_on_after_the_largest_that_is_taken(method: str) -> None:
    """What a step leaves behind must not have every later one skipped."""
    kind = ("everywhere", "one entry")[len(method) % 2]
    _, world = built(method, "vmap")
    params = parameters()
    state = world.init(params)
    for step in range(3):
        _, state = world.update(at_the_limit(kind, step), state, params)
    before = int(exchange_state(state).skipped)
    counts = []
    for step in range(4):
        updates, state = world.update(gradients("normal", step), state, params)
        counts.append(int(exchange_state(state).skipped) - before)
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in (*updates.values(), *kept(state)))
    assert counts[-1] <= 2 and counts[-1] == counts[-2], f"skipped {counts}"


@keeping
def test_a_memory_that_is_not_finite_costs_one_step(method: str) -> None:
    """As a state from elsewhere may have it: one entry of one worker's memory."""
    _, world = built(method, "vmap")
    params, value = parameters(), (np.nan, np.inf)[len(method) % 2]
    _, state = world.update(gradients("normal", 1), world.init(params), params)

    def spoil(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        spoilt = np.array(leaf)
        spoilt.reshape(-1)[0] = value
        return spoilt

    def spoilt_memory(node: Any) -> Any:
        return node._replace(memory=jax.tree.map(spoil, node.memory)) if is_exchange(node) else node

    def is_exchange(node: Any) -> bool:
        return isinstance(node, gc.ExchangeState)

    if not jax.tree.leaves(exchange_state(state).memory):
        return
    spoilt = jax.tree.map(spoilt_memory, state, is_leaf=is_exchange)
    if METHODS[method].law == "estimate":
        # Estimates have no zeros of their own: they are reset by name.
        spoilt, count = gc.reset_nonfinite(spoilt)
        assert count > 0 and all(np.isfinite(x).all() for x in kept(spoilt))
    skipped = []
    for step in range(3):
        updates, spoilt = world.update(gradients("normal", step), spoilt, params)
        skipped.append(int(exchange_state(spoilt).skipped))
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in (*updates.values(), *kept(spoilt)))
    assert skipped[-1] <= 1 and np.asarray(updates["matrix"]).any()


@pytest.mark.parametrize("size", (1e18, 1e25, 3e37))
def test_a_clipped_gradient_has_the_norm_asked_for_however_large_it_was(size: float) -> None:
    tx = gc.local_clip(2.0, axis_name=None)
    gradient = {"a": np.float32([3.0 * size / 5, -4.0 * size / 5]), "b": np.zeros((2, 2), np.float32)}
    clipped, _ = jax.jit(tx.update)(gradient, tx.init(gradient))
    np.testing.assert_allclose(clipped["a"], [1.2, -1.6], rtol=1e-6)


def test_adams_squares_stay_finite() -> None:
    """A gradient whose square overflows is skipped while the variance is being measured, and afterwards."""
    tx = gc.one_bit_adam(axis_name=None, warm_up_steps=2)
    params = {"w": np.zeros((64, 64), np.float32)}
    state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
    for step, size in enumerate((1.0, 1e20, 1.0, 1e20, 1.0)):
        before = state
        updates, state = update({"w": np.full((64, 64), size, np.float32)}, state)
        assert np.isfinite(updates["w"]).all() and all(np.isfinite(x).all() for x in kept(state))
        if size > 1:
            assert not updates["w"].any() and int(state.taken) == int(before.taken)
            assert sum(int(s.skipped) for s in (state.dense, state.compressed)) == (step + 1) // 2
