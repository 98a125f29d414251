"""What every method promises, in every environment."""

import functools
import math
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax.transforms.frozen_adam import FrozenAdamState
from tests.methods.replay.power_iteration import low_rank_step, unit_columns

from .environments import (
    AXIS,
    ENVIRONMENTS,
    FEWER,
    WORKERS,
    Environment,
    as_float32,
    by_worker,
    environment,
    exchange_state,
    found_in,
    rows_of_owners,
)
from .methods import FEW, METHODS, VARIANTS, Case

SHAPES = {
    "scalar": ((), jnp.float32),
    "empty": ((0,), jnp.float32),
    "bias": ((131,), jnp.float32),
    "matrix": ((61, 37), jnp.float32),
    "half": ((4, 5, 30), jnp.bfloat16),
}
KINDS = ("normal", "zero", "constant", "one-worker")


def parameters() -> Any:
    return {name: np.ones(shape, dtype) for name, (shape, dtype) in SHAPES.items()}


def gradients(kind: str, seed: int = 0) -> Any:
    """Per-worker gradients ``[WORKERS, ...]`` of the given kind."""
    result = {}
    for number, (name, (shape, dtype)) in enumerate(SHAPES.items()):
        # A leaf's numbers do not depend on which other leaves there are.
        rng = np.random.default_rng((seed, number))
        if kind == "zero":
            value = np.zeros((WORKERS, *shape))
        elif kind == "constant":
            value = np.full((WORKERS, *shape), 0.37)
        else:
            value = rng.standard_normal((WORKERS, *shape)) * rng.choice([1e-3, 1.0, 30.0], size=(WORKERS, *shape))
            if kind == "one-worker":
                value[np.arange(WORKERS) != 3] = 0
        result[name] = np.asarray(value, dtype)
    return result


@functools.cache
def built(method: str, env: str) -> tuple[Case, Environment]:
    """One compiled update for each method and environment, shared by the tests."""
    case = METHODS[method]
    return case, environment(env, case.make(AXIS))


each_method = pytest.mark.parametrize("method", METHODS)


def is_variant(method: str) -> bool:
    """Another form of a method that has a case of its own."""
    return "-" in method and not method.startswith("dense")


WHOLE = [method for method in METHODS if not is_variant(method) or method in VARIANTS]
"""For laws that are of what lies around an exchange: another form of a method adds nothing to them."""


def environments_of(method: str) -> tuple[str, ...]:
    """Where the laws of a method are tried: on one device and in one of the others, in turn; another form of it in one of all.

    What differs between environments is the collectives, which all methods share.
    """
    if method in FEW:
        return FEWER
    number = zlib.crc32(method.encode())
    if method not in WHOLE:
        return (ENVIRONMENTS[number % len(ENVIRONMENTS)],)
    others = [env for env in ENVIRONMENTS if env != "vmap"]
    return (others[number % len(others)], "vmap")


def quick_environments(method: str) -> tuple[str, ...]:
    """Where the README's line runs a method."""
    if is_variant(method):
        return ("vmap",) if method in VARIANTS else ()
    return FEWER if method in FEW else ("vmap",)


def in_environment(method: str, env: str) -> Any:
    marks = [] if env in quick_environments(method) else [pytest.mark.slow]
    return pytest.param(method, env, marks=marks)


each_method_everywhere = pytest.mark.parametrize(
    ("method", "env"), [in_environment(method, env) for method in METHODS for env in environments_of(method)]
)


COMPRESSED = ("half", "matrix")
"""The leaves that the default rule selects: two or more dimensions, and enough entries to gain."""


@each_method_everywhere
def test_replicas_agree_and_nothing_is_lost(method: str, env: str) -> None:
    case, world = built(method, env)
    params = parameters()
    state = world.init(params)
    structure = jax.tree.map(lambda a: (a.shape, a.dtype), state)
    kinds = ("zero", *KINDS, "normal")
    for seed, kind in enumerate(kinds):
        gradient = gradients(kind, seed)
        updates, new = world.update(gradient, state, params)
        for name, value in updates.items():
            assert value.dtype == SHAPES[name][1]
            assert len({replica.tobytes() for replica in np.asarray(value)}) == 1, f"{name}: replicas differ"
            assert np.isfinite(np.asarray(value, np.float32)).all()
            assert seed or not np.asarray(value, np.float32).any(), f"{name}: something came of nothing"
        assert jax.tree.map(lambda a: (a.shape, a.dtype), new) == structure
        check_law(case, world, gradient, updates, state, new)
        state = new
    assert int(exchange_state(state).step) == len(kinds)
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
            # What a cast to bfloat16 costs, on the uplink and on the downlink.
            half = 2**-7 if SHAPES[name][1] == jnp.bfloat16 else 0
            np.testing.assert_allclose(update[name], mean[name], atol=(case.tolerance + half) * largest, rtol=0)
    elif case.law == "unbiased":
        for name in mean:
            # No value outruns the largest gradient by more than the code's steps.
            largest = np.abs(gradient32[name]).max(initial=0)
            assert np.abs(update[name]).max(initial=0) <= largest * case.outruns * (1 + 2**-7) + 1e-30
            if not largest:
                assert not update[name].any()
    elif case.law == "vote":
        check_vote(gradient32, update, case)
    elif case.law == "estimate":
        check_estimate(case, world, gradient32, update, new)
    elif case.law == "low-rank direction":
        check_low_rank_direction(case, world, gradient32, update, old, new)
    elif case.law == "adam":
        # What is exchanged is the momentum, and so that is what nothing may be lost of.
        before, after = (as_float32(found_in(s, FrozenAdamState).mean) for s in (old, new))
        pushed = {k: np.float32(0.9) * before[k] + np.float32(0.1) * g for k, g in gradient32.items()}
        check_conservation(case, world, pushed, {k: m.astype(np.float64) for k, m in after.items()}, old, new)
    else:
        check_conservation(case, world, gradient32, update, old, new)


def check_vote(gradient: Any, update: Any, case: Case) -> None:
    """Signs and zeros only; a majority that no vote of a zero or a silent worker can turn decides."""
    for name, u in update.items():
        assert set(np.unique(u)) <= {-1.0, 0.0, 1.0}
        votes = np.sign(gradient[name])
        if case.wire and isinstance(case.wire[0], type(gc.compressors.sign())) and name in COMPRESSED:
            total = votes.sum(axis=0)
            sure = np.abs(total) > (votes == 0).sum(axis=0)
            np.testing.assert_array_equal(u[sure], np.sign(total)[sure])
        if not np.abs(gradient[name]).max(initial=0):
            assert name in COMPRESSED or not u.any()


def held(case: Case, world: Environment, state: Any) -> Iterator[tuple[list[str], Any, np.ndarray]]:
    """Of each segment its leaves, its memory, and what workers keep on the mean, with what its owners do, as memories lie."""
    exchange = exchange_state(state)
    for members, memory, server in zip(segments_of(case), exchange.memory, exchange.server, strict=True):
        owners = rows_of_owners(server.value, WORKERS) if isinstance(server, gc.PerDevice) else None
        for leaves, kept in zip(members, memory, strict=True):
            kept = getattr(kept, "accumulated", kept)
            mean = np.zeros(sum(math.prod(SHAPES[name][0]) for name in leaves))
            if isinstance(kept, gc.PerDevice):
                mean = by_worker(kept, world).reshape(WORKERS, -1).astype(np.float64).mean(axis=0)
            if owners is not None:
                dealt = dealt_over(case, leaves, mean.size)
                mine, owners = np.split(owners, [dealt or mean.size // owners.shape[-1]])
                # What owners of estimates have not passed on is in the estimates already.
                sign = -1 if case.law == "estimate" else 1
                mean = mean + sign * (mine.T if dealt else mine).reshape(-1)[: mean.size]
            yield leaves, kept, mean


def check_estimate(case: Case, world: Environment, gradient: Any, update: Any, new: Any) -> None:
    """The update is the mean of the workers' estimates but for what owners have, and what is sent whole is exact."""
    for leaves, kept, mean in held(case, world, new):
        estimates, seen = by_worker(kept, world).reshape(WORKERS, -1), as_rows(case, gradient, leaves, kept)
        want = as_rows(case, {k: update[k][None] for k in leaves}, leaves, kept)[0]
        scale = max(np.abs(estimates).max(initial=0), np.abs(seen).max(initial=0), 1e-30)
        half = 2**-8 * np.abs(want).max(initial=0) if "half" in leaves else 0
        np.testing.assert_allclose(mean, want, atol=4e-6 * scale + half, rtol=0)
        if leaves[0] not in chosen_of(case):
            np.testing.assert_allclose(estimates, seen, atol=4e-6 * scale, rtol=0)


def check_low_rank_direction(case: Case, world: Environment, gradient: Any, update: Any, old: Any, new: Any) -> None:
    """Of the mean momentum a twentieth of its part in the span of P goes, and shows the direction; others are signs."""
    codes = [code for members in exchange_state(old).compressor for code in members]
    for (leaves, _, before), (_, now, after), code in zip(
        held(case, world, old), held(case, world, new), codes, strict=True
    ):
        if leaves[0] not in chosen_of(case):
            assert all(set(np.unique(update[name])) <= {-1.0, 0.0, 1.0} for name in leaves)
            continue
        rows, columns = np.prod(SHAPES[leaves[0]][0][:-1], dtype=int), SHAPES[leaves[0]][0][-1]
        seen = (as_rows(case, gradient, leaves, now).mean(axis=0) + before).reshape(rows, columns)
        p, r = low_rank_step(seen, code[0])
        kept = seen - 0.05 * p @ r.T
        np.testing.assert_allclose(after.reshape(rows, columns), kept, atol=2e-5 * np.abs(seen).max(initial=0), rtol=0)
        want = np.sqrt(columns / rows) * p @ unit_columns(r).T
        tolerance = (2**-7 if leaves == ["half"] else 1e-4) * np.abs(want).max(initial=0)
        np.testing.assert_allclose(update[leaves[0]].reshape(rows, columns), want, atol=tolerance, rtol=0)


def check_conservation(case: Case, world: Environment, gradient: Any, update: Any, old: Any, new: Any) -> None:
    """What was kept and the mean of what was seen are the update and what is kept, entry by entry; padding holds nothing."""
    memory = [m for members in exchange_state(old).memory for m in members]
    for (leaves, was, before), (_, now, after), kept in zip(
        held(case, world, old), held(case, world, new), memory, strict=True
    ):
        pushed = as_rows(case, gradient, leaves, now)
        if case.law == "momentum":
            u = by_worker(kept.velocity, world).reshape(WORKERS, -1).astype(np.float64)
            pushed = 0.9 * (u + pushed) + pushed if case.nesterov else 0.9 * u + pushed
        sent = as_rows(case, {name: update[name][None] for name in leaves}, leaves, now)[0]
        # An owner keeps N times the mean's rounding: single workers hold more than the mean shows.
        largest = [np.abs(np.asarray(x)).max(initial=0) for x in (pushed, *jax.tree.leaves((was, now)))]
        half = 2**-8 * np.abs(sent).max(initial=0) if "half" in leaves and case.law != "adam" else 0
        seen = pushed.mean(axis=0) + case.decay * before
        np.testing.assert_allclose(sent + after, seen, atol=2e-6 * max(*largest, 1e-30) + half, rtol=0)
        padding = as_rows(case, {name: np.ones((1, *SHAPES[name][0])) for name in leaves}, leaves, now)[0] == 0
        assert not after[padding].any(), "the padding holds something"


def as_rows(case: Case, leaves: Any, names: list[str], kept: Any) -> np.ndarray:
    """Stacked leaves as the rows of one segment, laid end to end as its memory is: float64 ``[workers, rows * block]``."""
    stacked = [np.asarray(leaves[name], np.float64) for name in names]
    count, compressed = stacked[0].shape[0], names[0] in chosen_of(case)
    if compressed and case.view == "columns":
        stacked = [np.moveaxis(x, -1, 1) for x in stacked]
    flat = np.concatenate([x.reshape(count, -1) for x in stacked], axis=1)
    block = kept.value.shape[-1] if isinstance(kept, gc.PerDevice) else 1
    rows = -(-flat.shape[1] // block)
    flat = np.pad(flat, [(0, 0), (0, rows * block - flat.shape[1])])
    return flat


def dealt_over(case: Case, names: list[str], size: int) -> int | None:
    """Over how many rows the entries of a segment are dealt out, those of a selection; ``None`` where they are not."""
    block = 1024 if case.is_sparsifier else None
    if names[0] not in chosen_of(case):
        block = None
    elif case.wire:
        code = case.code(SHAPES[names[0]][0])
        block = code.block if code.deals else None
    periods = tuple(n for name in names for n in gc.kernels.periods_of(SHAPES[name][0]))
    return None if block is None else gc.kernels.dealt_rows(size, block, periods)


def chosen_of(case: Case) -> list[str]:
    present = [name for name in sorted(SHAPES) if name != "empty"]
    return present if case.whole_tree else list(COMPRESSED)


def segments_of(case: Case) -> list[list[list[str]]]:
    """The leaves of each segment of each group: a group for each compressor, and one segment for all that goes dense."""
    chosen = chosen_of(case)
    rest = [name for name in sorted(SHAPES) if name != "empty" and name not in chosen]
    groups: dict[Any, list[list[str]]] = {}
    for name in chosen:
        groups.setdefault(case.code(SHAPES[name][0]) if case.wire else None, []).append([name])
    listed = [
        [[name for leaves in members for name in leaves]] if case.view == "tree" else members
        for members in groups.values()
    ]
    return [*listed, [rest] if rest else []]


@each_method_everywhere
def test_a_bad_gradient_skips_the_exchange_on_every_worker(method: str, env: str) -> None:
    _, world = built(method, env)
    params = parameters()
    _, state = world.update(gradients("normal", 7), world.init(params), params)
    for poison, place in ((np.nan, (10, 3)), (np.inf, (0, 0)), (-np.inf, (-1, -1))):
        bad = gradients("normal", 8)
        bad["matrix"][(5, *place)] = poison
        updates, after = world.update(bad, state, params)
        for name, value in updates.items():
            assert not np.asarray(value, np.float32).any(), (name, poison)
        old, new = exchange_state(state), exchange_state(after)
        kept = zip(jax.tree.leaves((old.memory, old.server)), jax.tree.leaves((new.memory, new.server)), strict=True)
        for a, b in kept:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=str(poison))
        assert int(new.skipped) == int(old.skipped) + 1
        assert int(new.step) == int(old.step) + 1
        updates, state = world.update(gradients("normal", 9), after, params)
        assert np.asarray(updates["matrix"]).any(), f"the exchange did not recover from {poison}"


@pytest.mark.parametrize(
    ("method", "environments"),
    [
        *(pytest.param(m, quick_environments(m), id=m) for m in METHODS if len(quick_environments(m)) > 1),
        *(
            pytest.param(
                m, ENVIRONMENTS if m in FEW[2:] else environments_of(m), id=f"{m}, all", marks=pytest.mark.slow
            )
            for m in WHOLE
        ),
    ],
)
def test_environments_agree(method: str, environments: tuple[str, ...]) -> None:
    params, gradient = parameters(), gradients("normal", 3)
    results = {}
    for env in environments:
        _, world = built(method, env)
        state = world.init(params)
        updates, state = world.update(gradient, state, params)
        updates, _ = world.update(gradients("normal", 4), state, params)
        results[env] = as_float32(updates)
    first = results[environments[0]]
    for env, other in results.items():
        for name in first:
            scale = np.abs(first[name]).max(initial=0) + 1e-30
            # Equal up to the order in which N numbers are added, in bfloat16 where the backend does that.
            loose = METHODS[method].tolerance if METHODS[method].law == "mean" else 1e-6
            atol = (loose + (2**-7 if name == "half" else 0)) * scale
            np.testing.assert_allclose(other[name], first[name], atol=atol, err_msg=f"{env} {name}")


@pytest.mark.parametrize("method", [m for m in METHODS if m in FEW])
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
