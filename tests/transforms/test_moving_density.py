"""Densities that follow a schedule or hold an error, and the error itself."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from tests.conformance.environments import environment
from tests.methods.oracle import dealt, how_many

AXIS, N, SHAPE = "data", 8, (32, 64)
DENSITIES = (1 / 64, 4 / 64, 16 / 64)


def block64(density, *, block):
    """A block that all of the densities can share, and that divides the tensor."""
    del block
    return gc.compressors.topk(density, block=64, dtype=jnp.float32)


def draw(rng, alike=0.0):
    """Workers' gradients that have ``alike`` in common."""
    common = rng.standard_normal(SHAPE)
    return {"w": np.asarray(alike * common + (1 - alike) * rng.standard_normal((N, *SHAPE)), np.float32)}


def in_blocks(x):
    """Workers' tensors as the blocks that they are dealt out over: ``[N, rows, 64]``."""
    rows = how_many([SHAPE], 64)
    return np.stack([dealt(worker, 64, rows) for worker in np.asarray(x)])


def naive(gradient, memory, k):
    """The selection error of every row, in NumPy."""

    def select(rows):
        kept = np.zeros_like(rows)
        for r, row in enumerate(rows):
            best = np.argsort(-np.abs(row))[:k]
            kept[r, best] = row[best]
        return kept

    gradient, memory = (in_blocks(a) for a in (gradient, memory))
    x = gradient + memory
    sent = np.mean([select(rows) for rows in x], axis=0)
    return np.linalg.norm(select(x.mean(axis=0)) - sent) / np.linalg.norm(gradient.mean(axis=0))


def test_the_error_is_that_of_the_definition() -> None:
    # So few of a row that the selection is exact.
    tx = gc.density_controller(
        (1 / 64, 2 / 64, 4 / 64),
        1e9,
        axis_name=AXIS,
        every=1,
        rows=64,
        mask=True,
        make=block64,
        collective="all_gather",
    )
    world, params, rng = environment("vmap", tx), {"w": np.zeros(SHAPE, np.float32)}, np.random.default_rng(0)
    state, levels = world.init(params), [2]
    for _ in range(4):
        gradient = draw(rng)
        memory = np.asarray(state.exchange.memory[0][0].value, np.float64)
        k = [1, 2, 4][int(state.level)]
        _, state = world.update(gradient, state, params)
        want = naive(np.asarray(gradient["w"], np.float64), memory, k)
        np.testing.assert_allclose(float(state.error), want, rtol=1e-4)
        levels.append(int(state.level))
    # Far below the target: the density falls, a level at a time, and stays at the lowest.
    assert levels == [2, 1, 0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("env", ["shard_map-explicit"])
def test_the_controller_raises_the_density_where_workers_disagree(env) -> None:
    """Workers that agree need few entries; when they cease to, the error passes the target and the density rises."""
    tx = gc.density_controller(DENSITIES, 0.8, axis_name=AXIS, every=2, mask=True, make=block64)
    world, params, rng = environment(env, tx), {"w": np.zeros(SHAPE, np.float32)}, np.random.default_rng(1)
    state = world.init(params)
    for _ in range(8):
        _, state = world.update(draw(rng, alike=1.0), state, params)
    agreed = int(state.level)
    for _ in range(30):
        _, state = world.update(draw(rng), state, params)
    assert agreed == 0
    assert int(state.level) > 0
    if world.jitted is not None:
        assert world.jitted._cache_size() == 1, "a density was compiled by itself"


@pytest.mark.standard_promotion
def test_a_schedule_takes_the_lowest_density_that_suffices() -> None:
    schedule = optax.piecewise_constant_schedule(0.2, {2: 0.25, 4: 0.01})
    tx = gc.density_schedule(DENSITIES, schedule, axis_name=AXIS, mask=True, make=block64)
    world, params, rng = environment("vmap", tx), {"w": np.zeros(SHAPE, np.float32)}, np.random.default_rng(2)
    state, sent = world.init(params), []
    for _ in range(6):
        updates, state = world.update(draw(rng, alike=1.0), state, params)
        sent.append(int((in_blocks(updates["w"])[0] != 0).sum(axis=1).max()))
    assert sent == [16, 16, 4, 4, 1, 1]


def test_nothing_is_lost_as_the_density_moves() -> None:
    tx = gc.density_controller(DENSITIES, 0.5, axis_name=AXIS, every=1, mask=True, make=block64)
    world, params, rng = environment("vmap", tx), {"w": np.zeros(SHAPE, np.float32)}, np.random.default_rng(3)
    state, seen, got = world.init(params), np.zeros(SHAPE), np.zeros(SHAPE)
    for step in range(12):
        gradient = draw(rng, alike=step / 12)
        updates, state = world.update(gradient, state, params)
        seen += np.asarray(gradient["w"], np.float64).mean(axis=0)
        got += np.asarray(updates["w"], np.float64)[0]
    kept = np.asarray(state.exchange.memory[0][0].value, np.float64).mean(axis=0).reshape(SHAPE)
    np.testing.assert_allclose(got + kept, seen, atol=1e-4)


def test_a_bad_gradient_leaves_the_level_alone() -> None:
    tx = gc.density_controller(DENSITIES, 1e-6, axis_name=AXIS, every=1, mask=True, make=block64)
    world, params, rng = environment("vmap", tx), {"w": np.zeros(SHAPE, np.float32)}, np.random.default_rng(4)
    _, state = world.update(draw(rng), world.init(params), params)
    bad = draw(rng)
    bad["w"][3, 5, 7] = np.nan
    updates, after = world.update(bad, state, params)
    assert int(after.level) == int(state.level)
    assert not np.asarray(updates["w"]).any()
    # Nor has one of zeros, of a batch that is all padding, an error, while memories send what they have.
    updates, after = world.update({"w": np.zeros_like(bad["w"])}, state, params)
    assert int(after.level) == int(state.level)
    assert np.asarray(updates["w"]).any()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: gc.density_schedule((), lambda step: 1.0, axis_name=None), "densities must not be empty"),
        (lambda: gc.density_schedule((0.0, 0.1), lambda step: 1.0, axis_name=None), "density must be in"),
        (lambda: gc.density_controller((0.1,), 0.0, axis_name=None), "target_error must be a positive"),
        (
            lambda: gc.density_controller((0.1,), 1.0, axis_name=None, make=gc.compressors.random_k),
            "one of selections by size, and RandomK is none",
        ),
        (lambda: gc.density_controller((0.1,), 1.0, axis_name=None, every=0), "every must be an integer"),
    ],
)
def test_bad_options_name_the_remedy(build, message) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_shards_of_an_update_are_refused() -> None:
    collective = gc.collectives.ReduceScatter(jax.sharding.PartitionSpec("data"))
    with pytest.raises(ValueError, match="updates that all workers have whole"):
        gc.density_controller((1 / 64, 1 / 16), 0.5, axis_name="data", collective=collective)
