"""Outer steps with some replicas missing, replicas that count differently, and those that join late."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from tests.replicas.problem import AXIS, N, batch, each, gradient, loss, mesh_of, params, replicas, start

pytestmark = pytest.mark.slow

RATE, EVERY = 0.02, 3


def dense():
    return gc.weighted(gc.dense(axis_name=AXIS), axis_name=AXIS)


def compressed():
    code = gc.compressors.topk(0.25, block=8, dtype=jnp.float32)
    exchange = gc.exchange(code, axis_name=AXIS, mask=True, collective="all_gather")
    return gc.weighted(exchange, axis_name=AXIS)


def weighed_batch(step: int, weights) -> dict[str, np.ndarray]:
    return batch(step, len(weights)) | {"weight": np.asarray(weights, np.float32)}


def weighed_loss(p, b):
    return loss(p, {name: b[name] for name in ("a", "y")})


@functools.cache
def step_of(tx, workers: int = N):
    return gc.make_train_step(weighed_loss, tx, mesh_of(workers), weight=lambda b: b["weight"], donate=False)


def outer_of(state) -> gc.replicas.OuterState:
    return state.opt_state[-1]


def test_an_outer_step_is_of_those_who_are_there() -> None:
    """Against NumPy: DiLoCo with Nesterov momentum, whose second outer step has two replicas missing."""
    tx = optax.chain(optax.sgd(RATE), gc.diloco(dense(), axis_name=AXIS, every=EVERY))
    state = gc.init_state(params(), tx, mesh_of(), replicas=True)
    oracle, centre = start(), start()[0]
    trace = each(np.zeros_like, centre)
    weights = {2: [1, 1, 1, 1], 5: [2, 0, 1, 0], 8: [0, 3, 3, 1]}
    for n in range(9):
        now = weights.get(n, [1, 0, 0, 0])  # Nobody asks between outer steps.
        state, metrics = step_of(tx)(state, weighed_batch(n, now))
        oracle = [each(lambda x, g: x - RATE * g, x, gradient(x, n, i)) for i, x in enumerate(oracle)]
        if n in weights:
            mean = functools.partial(np.average, axis=0, weights=now)
            apart = each(lambda c, *xs, mean=mean: mean([c - x for x in xs]), centre, *oracle)
            trace = each(lambda m, d: 0.9 * m + d, trace, apart)
            centre = each(lambda c, d, m: c - 0.7 * (d + 0.9 * m), centre, apart, trace)
            oracle = [dict(centre) for _ in oracle]
        for got, want in zip(replicas(state), oracle, strict=True):
            for k in want:
                np.testing.assert_allclose(got[k], want[k], rtol=2e-5, atol=2e-5)
    assert float(metrics["skipped"]) == 0


@pytest.mark.parametrize("delay", (1,))
def test_between_outer_steps_no_weight_is_sent(delay: int) -> None:
    sent = {}
    for method in (gc.dense(axis_name=AXIS), dense()):
        tx = optax.chain(optax.sgd(RATE), gc.diloco(method, axis_name=AXIS, every=EVERY, delay=delay))
        state, weight = gc.init_state(params(), tx, mesh_of(), replicas=True), (lambda b: b["weight"]) if sent else None
        step = gc.make_train_step(weighed_loss, tx, mesh_of(), weight=weight, mean_metrics=False)
        compiled = step.lower(state, weighed_batch(0, [1.0] * N)).compile()
        assert gc.wire_bytes(compiled, branch="min").sent == 0
        sent[weight is not None] = gc.wire_bytes(compiled, branch=-1).sent
    assert sent[True] - sent[False] == 4 * 2 * (N - 1) // N


@pytest.mark.parametrize("delay", (0, 1))
def test_without_anybody_there_is_no_outer_step_and_nothing_is_lost(delay: int) -> None:
    tx = optax.chain(optax.sgd(RATE), gc.diloco(dense(), axis_name=AXIS, every=EVERY, delay=delay))
    state = gc.init_state(params(), tx, mesh_of(), replicas=True)
    alone = gc.init_state(params(), optax.sgd(RATE), mesh_of(), replicas=True)
    by_itself = gc.make_train_step(loss, optax.sgd(RATE), mesh_of(), donate=False)
    for n in range(5):
        now = [0.0] * N if n == 2 + delay else [1.0] * N
        before = outer_of(state)
        state, metrics = step_of(tx)(state, weighed_batch(n, now))
        alone, _ = by_itself(alone, batch(n))
        if not any(now):
            assert np.isnan(float(metrics["loss"])) and float(metrics["skipped"]) == 1
            chex.assert_trees_all_equal(before.centre, outer_of(state).centre)
            chex.assert_trees_all_equal(before.outer, outer_of(state).outer)
    # No replica has gone back: each is where its own steps led.
    for got, want in zip(replicas(state), replicas(alone), strict=True):
        for k in want:
            np.testing.assert_array_equal(got[k], want[k])
    for n in range(5, 6 + delay):
        state, _ = step_of(tx)(state, weighed_batch(n, [1.0] * N))
    assert any((np.asarray(outer_of(state).centre[k]) != params()[k]).any() for k in params())


def test_a_missing_replica_keeps_its_residual_and_takes_the_centre() -> None:
    tx = optax.chain(optax.sgd(RATE), gc.outer_average(compressed(), optax.sgd(1.0), axis_name=AXIS, every=EVERY))
    state = gc.init_state(params(), tx, mesh_of(), replicas=True)
    for n in range(3):
        state, _ = step_of(tx)(state, weighed_batch(n, [1.0] * N))
    kept = [np.asarray(a).reshape(N, -1) for a in jax.tree.leaves(outer_of(state).method[0].memory)]
    assert any(a[1].any() for a in kept)
    for n in range(3, 6):
        state, _ = step_of(tx)(state, weighed_batch(n, [1, 0, 1, 1]))
    after = [np.asarray(a).reshape(N, -1) for a in jax.tree.leaves(outer_of(state).method[0].memory)]
    for old, new in zip(kept, after, strict=True):
        assert old[1].tobytes() == new[1].tobytes()
    assert any((old[0] != new[0]).any() for old, new in zip(kept, after, strict=True))
    for one in replicas(state):
        for k, v in one.items():
            np.testing.assert_allclose(v, outer_of(state).centre[k], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("method", "delay"), [(dense, 1), (compressed, 0)])
def test_who_joins_late_catches_up_with_one_copy_of_the_state(method, delay: int) -> None:
    """The outer step after a fourth has joined three is of what three have come, whatever is in flight or in a residual."""
    outer = gc.outer_average(method(), optax.sgd(0.5), axis_name=AXIS, every=2, delay=delay)
    tx = optax.chain(optax.scale(0.0), outer)
    state = gc.init_state(params(), tx, mesh_of(3), replicas=True)
    rng = np.random.default_rng(3)
    apart = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), state.params)
    state = state._replace(params=jax.device_put(apart, jax.tree.map(lambda a: a.sharding, state.params)))
    for n in range(3):
        state, _ = step_of(tx, 3)(state, weighed_batch(n, [1.0] * 3))
    resized = gc.resize_workers(state, old=3, new=4)
    mesh = mesh_of(4)
    four = jax.device_put(resized, gc.state_shardings(resized, mesh, axis_name=AXIS))
    for k, v in gc.consolidate(four).items():
        np.testing.assert_allclose(v, gc.consolidate(state)[k], rtol=1e-6, atol=1e-6)
    gc.check_equal_start({"step": four.step, "centre": outer_of(four).centre}, mesh, axis_name=AXIS)
    sums = []
    for one, workers in ((state, 3), (four, 4)):
        for n in range(3, 4 + delay):
            one, _ = step_of(tx, workers)(one, weighed_batch(n, [1.0] * workers))
        exchange = outer_of(one).method[0]
        assert int(exchange.skipped) == 0
        kept = [np.asarray(m, np.float64).reshape(workers, -1).mean(axis=0) for m in jax.tree.leaves(exchange.memory)]
        centre = [np.asarray(v, np.float64).reshape(-1) for v in jax.tree.leaves(outer_of(one).centre)]
        # A step of half of the mean: what is kept is twice as far from the centre.
        sums.append([c - 0.5 * k[: c.size] for c, k in zip(centre, kept or [np.zeros(15)] * 2, strict=True)])
    for three, joined in zip(*sums, strict=True):
        np.testing.assert_allclose(joined, three, rtol=1e-6, atol=2e-6)


def test_where_replicas_meet_as_equals_a_weight_is_refused() -> None:
    for method in (gc.elastic_average(dense(), axis_name=AXIS), gc.gossip(axis_name=AXIS)):
        tx = optax.chain(optax.sgd(RATE), method)
        state = gc.init_state(params(), tx, mesh_of(), replicas=True)
        with pytest.raises(ValueError, match=r"takes no weight=: .*; leave it out, or use gradcomp_jax.outer_average"):
            step_of(tx)(state, weighed_batch(0, [1.0] * N))
    with pytest.raises(ValueError, match=r"put it inside, such as gc\.diloco"):
        around = gc.weighted(gc.local_sgd(gc.dense(axis_name=AXIS), axis_name=AXIS, every=2), axis_name=AXIS)
        gc.init_state(params(), around, mesh_of(), replicas=True)
