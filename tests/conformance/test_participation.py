"""A weight for each worker, 0 for one that is absent: the mean over those present, and the law, for every method."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

import gradcomp_jax as gc

from .environments import AXIS, FEWER, WORKERS, Environment, environment, exchange_state
from .methods import FEW, METHODS, Case
from .test_conformance import WHOLE, built, check_law, gradients, parameters

WEIGHTS = np.asarray([3, 0, 1, 2, 5, 0, 1, 4], np.float32)
"""Of sum 16, so that N times a weight over the sum is exact."""

ABSENT = WEIGHTS == 0


def carried(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Takes each worker's weight out of its gradients, with which every environment hands it over."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        gradient = dict(updates)
        return tx.update(gradient, state, params, weight=gradient.pop("weight"), **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


@functools.cache
def weighing(method: str, env: str) -> tuple[Case, Environment]:
    case = METHODS[method]
    return case, environment(env, carried(gc.weighted(case.make(AXIS), axis_name=AXIS)))


def with_weights(gradient: Any, weights: Any) -> Any:
    return {**gradient, "weight": np.asarray(weights, np.float32)}


def spoilt(gradient: Any) -> Any:
    """With NaNs where nobody may look."""
    result = {name: np.array(value) for name, value in gradient.items()}
    for value in result.values():
        value[ABSENT] = np.nan
    return result


def shares(gradient: Any) -> Any:
    """What each worker has of the mean over all: a weighted gradient, in float32 whatever its dtype is."""
    result = {}
    for name, value in gradient.items():
        factor = (WEIGHTS * WORKERS / WEIGHTS.sum()).reshape(-1, *[1] * (value.ndim - 1))
        result[name] = np.where(factor == 0, 0, value.astype(np.float32)) * factor
    return result


def rows_of(value: Any, env: Environment) -> np.ndarray:
    """A per-device array as ``[workers, rows, ...]``."""
    value = np.asarray(value)
    return value.reshape(WORKERS, -1, *value.shape[1:]) if env.rows_first else value


def given_to_absent(old: Any, new: Any, env: Environment) -> tuple[Any, Any]:
    """Both states as if absent workers had begun with nothing: what is in their memories came in this step."""

    def only(of: Any, subtracted: Any) -> Any:
        rows = rows_of(of, env).astype(np.float64)
        rows[ABSENT] -= rows_of(subtracted, env)[ABSENT]
        return rows.reshape(np.shape(of))

    def within(state: Any) -> Any:
        def change(node: Any, before: Any) -> Any:
            if not isinstance(node, gc.ExchangeState):
                return node
            return dataclasses.replace(node, memory=jax.tree.map(only, node.memory, before.memory))

        return jax.tree.map(change, state, old, is_leaf=lambda n: isinstance(n, gc.ExchangeState))

    return within(old), within(new)


def where(method: str) -> list[Any]:
    """One device in the README's line, of one method; in CI also several devices of two."""
    every = FEWER if method in FEW[2:4] else ("vmap",)
    marks = {env: [] if (method, env) == ("dgc", "vmap") else [pytest.mark.slow] for env in every}
    return [pytest.param(method, env, marks=marks[env], id=f"{method}-{env}") for env in every]


LAWS = tuple({METHODS[method].law: method for method in reversed(WHOLE)}.values())
"""The first method of each law."""

PARTICIPANTS = [method for method in WHOLE if method in (*FEW, *LAWS, "random_k-sum", "topk-server")]
"""Weights go around an exchange: the few, one method of each law, and owners and sums with a residual."""

each_method = pytest.mark.parametrize(("method", "env"), [p for method in PARTICIPANTS for p in where(method)])


@each_method
def test_those_who_are_present_are_averaged_and_nothing_is_lost(method: str, env: str) -> None:
    case, world = weighing(method, env)
    params, first, second = parameters(), gradients("normal", 1), gradients("normal", 2)
    _, old = world.update(with_weights(first, np.ones(WORKERS)), world.init(params), params)
    updates, new = world.update(with_weights(spoilt(second), WEIGHTS), old, params)
    for name, value in updates.items():
        assert len({replica.tobytes() for replica in np.asarray(value)}) == 1, f"{name}: replicas differ"
        assert np.isfinite(np.asarray(value, np.float32)).all()
    assert int(exchange_state(new).skipped) == 0
    seen = shares(second)
    if case.law == "estimate":
        # What an absent worker has counts as before, and all of it is in the mean.
        for name, value in seen.items():
            value[ABSENT] = first[name][ABSENT]
        check_law(case, world, seen, updates, old, new)
    else:
        check_law(case, world, seen, updates, *given_to_absent(old, new, world))
    # They are back.
    updates, after = world.update(with_weights(gradients("normal", 3), np.ones(WORKERS)), new, params)
    assert int(exchange_state(after).skipped) == 0 and np.asarray(updates["matrix"], np.float32).any()


@each_method
def test_an_absent_worker_keeps_its_memory(method: str, env: str) -> None:
    """Bit by bit where nothing comes back; in two phases it is still an owner, and takes what that leaves over."""
    case, world = weighing(method, env)
    params = parameters()
    _, old = world.update(with_weights(gradients("normal", 1), np.ones(WORKERS)), world.init(params), params)
    _, new = world.update(with_weights(spoilt(gradients("normal", 2)), WEIGHTS), old, params)
    pairs = zip(jax.tree.leaves(exchange_state(old).memory), jax.tree.leaves(exchange_state(new).memory), strict=True)
    comes_back = case.wire is None or "two_phase" in (case.wire[1], case.rest[1]) or case.law == "adam"
    for before, after in pairs:
        a, b = rows_of(before, world)[ABSENT], rows_of(after, world)[ABSENT]
        if not comes_back:
            assert a.tobytes() == b.tobytes()
        assert np.linalg.norm(b - a) <= 30.0 * a.size**0.5
        assert b.any() == a.any() or comes_back


@pytest.mark.slow
@pytest.mark.parametrize(("method", "env"), [p for method in FEW[1:] for p in where(method)])
def test_equal_weights_are_the_method(method: str, env: str) -> None:
    _, world = weighing(method, env)
    _, plain = built(method, env)
    params = parameters()
    state, wanted = world.init(params), plain.init(params)
    for seed in (5, 6):
        gradient = gradients("normal", seed)
        updates, state = world.update(with_weights(gradient, np.full(WORKERS, 4)), state, params)
        want, wanted = plain.update(gradient, wanted, params)
        for found, expected in zip(jax.tree.leaves((updates, state)), jax.tree.leaves((want, wanted)), strict=True):
            found, expected = (np.asarray(a).astype(np.float64) for a in (found, expected))
            scale = np.abs(expected).max(initial=0)
            np.testing.assert_allclose(found, expected, atol=1e-6 * scale, rtol=0)


@each_method
def test_without_a_usable_weight_all_workers_skip(method: str, env: str) -> None:
    _, world = weighing(method, env)
    params = parameters()
    _, state = world.update(with_weights(gradients("normal", 1), np.ones(WORKERS)), world.init(params), params)
    bad = np.repeat(WEIGHTS[None], 4, axis=0)
    bad[:, 2] = (-1, np.nan, np.inf, -100)
    for weights in (np.zeros(WORKERS), *bad):
        gradient = gradients("normal", 2) if weights.any() else spoilt(gradients("normal", 2))
        updates, after = world.update(with_weights(gradient, weights), state, params)
        assert not any(np.asarray(value, np.float32).any() for value in updates.values()), weights
        old, new = exchange_state(state), exchange_state(after)
        assert int(new.skipped) == int(old.skipped) + 1 and int(new.step) == int(old.step) + 1
        kept = zip(jax.tree.leaves((old.memory, old.server)), jax.tree.leaves((new.memory, new.server)), strict=True)
        for a, b in kept:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
