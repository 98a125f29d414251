"""What every method promises, in every environment."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc

from .environments import (
    AXIS,
    ENVIRONMENTS,
    WORKERS,
    Environment,
    as_float32,
    by_worker,
    environment,
    exchange_state,
    share_rows,
)
from .methods import METHODS, Case

SHAPES = {
    "scalar": ((), jnp.float32),
    "empty": ((0,), jnp.float32),
    "one": ((1,), jnp.float32),
    "bias": ((131,), jnp.float32),
    "matrix": ((61, 37), jnp.float32),
    "kernel": ((3, 5, 64), jnp.float32),
    "half": ((20, 30), jnp.bfloat16),
    "flat": ((1, 1), jnp.float32),
}
KINDS = ("normal", "zero", "constant", "one-worker")


def parameters() -> Any:
    return {name: jnp.ones(shape, dtype) for name, (shape, dtype) in SHAPES.items()}


def gradients(kind: str, seed: int = 0) -> Any:
    """Per-worker gradients ``[WORKERS, ...]`` of the given kind."""
    rng = np.random.default_rng(seed)
    result = {}
    for name, (shape, dtype) in SHAPES.items():
        if kind == "zero":
            value = np.zeros((WORKERS, *shape))
        elif kind == "constant":
            value = np.full((WORKERS, *shape), 0.37)
        else:
            value = rng.standard_normal((WORKERS, *shape)) * rng.choice([1e-3, 1.0, 30.0], size=(WORKERS, *shape))
            if kind == "one-worker":
                value[np.arange(WORKERS) != 3] = 0
        result[name] = jnp.asarray(value, dtype)
    return result


@functools.cache
def built(method: str, env: str) -> tuple[Case, Environment]:
    """One compiled update for each method and environment, shared by the tests."""
    case = METHODS[method]
    return case, environment(env, case.make(AXIS))


each_method = pytest.mark.parametrize("method", METHODS)
everywhere = pytest.mark.parametrize("env", ENVIRONMENTS)


def memories(state: Any) -> Any:
    return exchange_state(state).memory


COMPRESSED = ("half", "kernel", "matrix")
"""The leaves that the default rule selects: two or more dimensions, and enough entries to gain."""


@each_method
@everywhere
def test_replicas_agree_and_nothing_is_lost(method: str, env: str) -> None:
    case, world = built(method, env)
    params = parameters()
    state = world.init(params)
    structure = jax.tree.map(lambda a: (a.shape, a.dtype), state)
    for seed, kind in enumerate((*KINDS, "normal")):
        gradient = gradients(kind, seed)
        updates, new = world.update(gradient, state, params)
        for name, value in updates.items():
            assert value.dtype == SHAPES[name][1]
            assert len({np.asarray(replica).tobytes() for replica in value}) == 1, f"{name}: replicas differ"
            assert np.isfinite(np.asarray(value, np.float32)).all()
        assert jax.tree.map(lambda a: (a.shape, a.dtype), new) == structure
        check_law(case, world, gradient, updates, state, new)
        state = new
    assert int(exchange_state(state).step) == len(KINDS) + 1
    assert int(exchange_state(state).skipped) == 0
    if world.jitted is not None:
        assert world.jitted._cache_size() == 1, "a later step was compiled again"


def check_law(case: Case, world: Environment, gradient: Any, updates: Any, old: Any, new: Any) -> None:
    gradient32, updates32 = as_float32(gradient), as_float32(updates)
    mean = {k: v.astype(np.float64).mean(axis=0) for k, v in gradient32.items()}
    update = {k: v[0].astype(np.float64) for k, v in updates32.items()}
    if case.law == "mean":
        for name in mean:
            largest = np.abs(gradient32[name]).max(initial=0)
            # What a cast to bfloat16 costs, on the way there and back.
            half = 2**-7 if SHAPES[name][1] == jnp.bfloat16 else 0
            np.testing.assert_allclose(update[name], mean[name], atol=(case.tolerance + half) * largest, rtol=0)
    elif case.law == "unbiased":
        for name in mean:
            # No value outruns the largest gradient (ternary again: times the number of levels' mean).
            assert np.abs(update[name]).max(initial=0) <= np.abs(gradient32[name]).max(initial=0) * (1 + 2**-7) + 1e-30
            if not np.abs(gradient32[name]).max(initial=0):
                assert not update[name].any()
    else:
        check_conservation(case, world, gradient32, update, old, new)


def check_conservation(case: Case, world: Environment, gradient: Any, update: Any, old: Any, new: Any) -> None:
    """mean of what was kept + gradient == update + mean of what is kept now, leaf by leaf."""
    for part, members in enumerate(pieces_of(case)):
        server_old, server_new = (exchange_state(s).server[part] for s in (old, new))
        start = 0
        assert len(memories(new)[part]) == len(members)
        for number, leaves in enumerate(members):
            g = np.concatenate([gradient[name].reshape(WORKERS, -1) for name in leaves], axis=1).astype(np.float64)
            sent = np.concatenate([update[name].reshape(-1) for name in leaves])
            kept_old, kept_new = (memories(s)[part][number] for s in (old, new))
            if case.law == "momentum":
                u = by_worker(kept_old.velocity, world).reshape(WORKERS, -1)[:, : g.shape[1]].astype(np.float64)
                pushed = 0.9 * (u + g) + g if case.nesterov else 0.9 * u + g
                kept_old, kept_new = kept_old.accumulated, kept_new.accumulated
            else:
                pushed = g
            # An owner keeps N times the mean's rounding: single workers hold more than the mean shows.
            largest = [np.asarray(k.value) for k in (kept_old, kept_new) if isinstance(k, gc.PerDevice)]
            before, after = (
                by_worker(k, world).reshape(WORKERS, -1).astype(np.float64).mean(axis=0)
                if isinstance(k, gc.PerDevice)
                else np.zeros(g.shape[1])
                for k in (kept_old, kept_new)
            )
            if isinstance(server_new, gc.PerDevice):
                rows = len(before) // server_new.value.shape[-1]
                span, start = slice(start, start + rows), start + rows
                before = before + share_rows(server_old, world)[span].reshape(-1)
                after = after + share_rows(server_new, world)[span].reshape(-1)
            seen = pushed.mean(axis=0) + before[: g.shape[1]]
            assert not after[g.shape[1] :].any(), "the padding holds something"
            scale = max(*(np.abs(x).max(initial=0) for x in (pushed, *largest)), 1e-30)
            half = 2**-8 * np.abs(sent).max(initial=0) if "half" in leaves else 0
            np.testing.assert_allclose(sent + after[: g.shape[1]], seen, atol=2e-6 * scale + half, rtol=0)


def pieces_of(case: Case) -> tuple[list[list[str]], list[list[str]]]:
    """The leaves of each piece: one piece for each compressed leaf, and one for all the others together."""
    present = [name for name in sorted(SHAPES) if name != "empty"]
    chosen = present if case.whole_tree else list(COMPRESSED)
    rest = [name for name in present if name not in chosen]
    return [[name] for name in chosen], [rest] if rest else []


@each_method
@everywhere
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_bad_gradient_skips_the_exchange_on_every_worker(method: str, env: str, poison: float) -> None:
    _, world = built(method, env)
    params = parameters()
    _, state = world.update(gradients("normal", 7), world.init(params), params)
    bad = gradients("normal", 8)
    bad["matrix"] = bad["matrix"].at[5, 10, 3].set(poison)
    updates, after = world.update(bad, state, params)
    for name, value in updates.items():
        assert not np.asarray(value, np.float32).any(), name
    old, new = exchange_state(state), exchange_state(after)
    for a, b in zip(jax.tree.leaves((old.memory, old.server)), jax.tree.leaves((new.memory, new.server)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert int(new.skipped) == int(old.skipped) + 1
    assert int(new.step) == int(old.step) + 1
    updates, _ = world.update(gradients("normal", 9), after, params)
    assert np.asarray(updates["matrix"]).any(), "the exchange did not recover"


@each_method
def test_environments_agree(method: str) -> None:
    params, gradient = parameters(), gradients("normal", 3)
    results = {}
    for env in ENVIRONMENTS:
        _, world = built(method, env)
        state = world.init(params)
        updates, state = world.update(gradient, state, params)
        updates, _ = world.update(gradients("normal", 4), state, params)
        results[env] = as_float32(updates)
    first = results[ENVIRONMENTS[0]]
    for env, other in results.items():
        for name in first:
            scale = np.abs(first[name]).max(initial=0) + 1e-30
            # Equal up to the order in which N numbers are added, in bfloat16 where the backend does that.
            loose = METHODS[method].tolerance if METHODS[method].law == "mean" else 1e-6
            atol = (loose + (2**-7 if name == "half" else 0)) * scale
            np.testing.assert_allclose(
                other[name],
                first[name],
                atol=atol,
                err_msg=f"{env} {name}",
            )


@each_method
def test_same_key_same_bits(method: str) -> None:
    """A second program of the same method, compiled on its own, gives the first one's bits."""
    case, first = built(method, "vmap")
    params, gradient = parameters(), gradients("normal", 11)
    runs = []
    for world in (first, environment("vmap", case.make(AXIS))):
        updates, _ = world.update(gradient, world.init(params), params)
        runs.append(jax.tree.map(np.asarray, updates))
    for name in runs[0]:
        np.testing.assert_array_equal(runs[0][name], runs[1][name])
