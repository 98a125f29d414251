"""What every method promises, in every environment."""

import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax.transforms.frozen_adam import FrozenAdamState
from tests.methods.replay.power_iteration import low_rank_step, unit_columns
from tests.quick import FEW, SOME, VARIANTS

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
from .methods import METHODS, Case

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
    """Where the laws of a method are tried: on one device and in one of the others, in turn.

    What differs between environments is the collectives, which all methods share.
    """
    if method in FEW:
        return FEWER
    others = [env for env in ENVIRONMENTS if env != "vmap"]
    return (others[zlib.crc32(method.encode()) % len(others)], "vmap")


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


def memories(state: Any) -> Any:
    return exchange_state(state).memory


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


def check_estimate(case: Case, world: Environment, gradient: Any, update: Any, new: Any) -> None:
    """The update is the mean of the workers' estimates but for what owners have, and what is sent whole is exact."""
    for group, members in enumerate(segments_of(case)):
        server, start = exchange_state(new).server[group], 0
        for number, leaves in enumerate(members):
            kept = memories(new)[group][number]
            estimates = by_worker(kept, world).reshape(WORKERS, -1).astype(np.float64)
            mean = estimates.mean(axis=0)
            if isinstance(server, gc.PerDevice):
                rows = dealt_over(case, leaves, len(mean)) or len(mean) // kept.value.shape[-1]
                span, start = slice(start, start + rows), start + rows
                mean = mean - owned(case, leaves, server, span, len(mean))
            want = as_rows(case, {k: update[k][None] for k in leaves}, leaves, kept)[0]
            scale = max(
                np.abs(estimates).max(initial=0), max(np.abs(gradient[k]).max(initial=0) for k in leaves), 1e-30
            )
            half = 2**-8 * np.abs(want).max(initial=0) if "half" in leaves else 0
            np.testing.assert_allclose(mean, want, atol=4e-6 * scale + half, rtol=0)
            if group == len(segments_of(case)) - 1:
                seen = as_rows(case, gradient, leaves, kept)
                np.testing.assert_allclose(estimates, seen, atol=4e-6 * scale, rtol=0)


def check_low_rank_direction(case: Case, world: Environment, gradient: Any, update: Any, old: Any, new: Any) -> None:
    """Of the mean momentum a twentieth of its part in the span of P goes, and shows the direction; others are signs."""
    before, after = exchange_state(old), exchange_state(new)
    for group, members in enumerate(segments_of(case)[:-1]):
        for number, (name,) in enumerate(members):
            kept_old, kept_new = (s.memory[group][number] for s in (before, after))
            rows, columns = np.prod(SHAPES[name][0][:-1], dtype=int), SHAPES[name][0][-1]
            seen, kept = (
                x.mean(axis=0).reshape(rows, columns)
                for x in (
                    as_rows(case, gradient, [name], kept_new) + by_worker(kept_old, world).reshape(WORKERS, -1),
                    by_worker(kept_new, world).reshape(WORKERS, -1).astype(np.float64),
                )
            )
            p, r = low_rank_step(seen, before.compressor[group][number][0])
            np.testing.assert_allclose(kept, seen - 0.05 * p @ r.T, atol=2e-5 * np.abs(seen).max(initial=0), rtol=0)
            want = np.sqrt(columns / rows) * p @ unit_columns(r).T
            tolerance = (2**-7 if name == "half" else 1e-4) * np.abs(want).max(initial=0)
            np.testing.assert_allclose(update[name].reshape(rows, columns), want, atol=tolerance, rtol=0)
    for name in segments_of(case)[-1][0]:
        assert set(np.unique(update[name])) <= {-1.0, 0.0, 1.0}


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


def owned(case: Case, names: list[str], server: gc.PerDevice, span: slice, size: int) -> np.ndarray:
    """What owners have of a segment with these rows of its group, as its memory lies: ``[size]``."""
    rows = rows_of_owners(server.value, WORKERS)[span]
    return (rows.T if dealt_over(case, names, size) else rows).reshape(-1)[:size]


def check_conservation(case: Case, world: Environment, gradient: Any, update: Any, old: Any, new: Any) -> None:
    """mean of what was kept + gradient == update + mean of what is kept now, leaf by leaf."""
    for group, members in enumerate(segments_of(case)):
        server_old, server_new = (exchange_state(s).server[group] for s in (old, new))
        start = 0
        assert len(memories(new)[group]) == len(members)
        for number, leaves in enumerate(members):
            kept_old, kept_new = (memories(s)[group][number] for s in (old, new))
            cut_as = kept_new.accumulated if case.law == "momentum" and kept_new else kept_new
            g = as_rows(case, gradient, leaves, cut_as)
            sent = as_rows(case, {name: update[name][None] for name in leaves}, leaves, cut_as)[0]
            if case.law == "momentum":
                u = by_worker(kept_old.velocity, world).reshape(WORKERS, -1).astype(np.float64)
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
            before = case.decay * before
            if isinstance(server_new, gc.PerDevice):
                block = server_new.value.shape[-1]
                rows = dealt_over(case, leaves, len(before)) or len(before) // block
                span, start = slice(start, start + rows), start + rows
                held = [owned(case, leaves, s, span, len(before)) for s in (server_old, server_new)]
                before, after = before + held[0], after + held[1]
            seen = pushed.mean(axis=0) + before
            padding = as_rows(case, {name: np.ones((1, *SHAPES[name][0])) for name in leaves}, leaves, cut_as)[0] == 0
            assert not after[padding].any(), "the padding holds something"
            scale = max(*(np.abs(x).max(initial=0) for x in (pushed, *largest)), 1e-30)
            half = 2**-8 * np.abs(sent).max(initial=0) if "half" in leaves and case.law != "adam" else 0
            np.testing.assert_allclose(sent + after, seen, atol=2e-6 * scale + half, rtol=0)


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
            pytest.param(m, ENVIRONMENTS if m in SOME else environments_of(m), id=f"{m}, all", marks=pytest.mark.slow)
            for m in METHODS
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
            np.testing.assert_allclose(
                other[name],
                first[name],
                atol=atol,
                err_msg=f"{env} {name}",
            )


@pytest.mark.parametrize("method", [pytest.param(m, marks=[] if m in FEW else [pytest.mark.slow]) for m in WHOLE])
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
