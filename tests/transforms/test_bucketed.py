"""Buckets: the same result, in several collectives, in the order of the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.core.context import context_of
from gradcomp_jax.transforms.bucketed import buckets_of
from tests.conformance.environments import exchange_state, vmapped
from tests.marks import slow_but

N = 4
SHAPES = {f"layer_{i}": {"bias": (24,), "kernel": (24, 24)} for i in (1, 2, 10)}
BYTES = 4 * 24 * 24
METHODS = {
    "dense": lambda: gc.dense(axis_name="data"),
    "dgc": lambda: gc.dgc(axis_name="data", density=1 / 32, block=64, clip_norm=3.0, warm_up=((2, 1 / 4),)),
    "topk": lambda: gc.topk_sgd(axis_name="data", density=1 / 32, block=64),
    "doubling": lambda: gc.topk_sgd(axis_name="data", density=1 / 32, block=64, collective="recursive_doubling"),
    "int8": lambda: gc.block_quantized(axis_name="data", block=64),
    "int8, server": lambda: gc.exchange(
        gc.compressors.block_quantized(block=64), axis_name="data", collective=gc.collectives.TwoPhase("server")
    ),
    "terngrad": lambda: gc.terngrad(axis_name="data"),
    "powersgd": lambda: gc.powersgd(axis_name="data", rank=2),
}


def params():
    return jax.tree.map(lambda s: np.ones(s, np.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def draw(rng):
    return jax.tree.map(lambda p: rng.standard_normal((N, *p.shape)).astype(np.float32), params())


def start(tx):
    return vmapped(tx, params(), N)


GATHERED = {
    "dgc": lambda: gc.dgc(axis_name="data", density=1 / 32, block=64, clip_norm=3.0, collective="all_gather"),
    "topk": lambda: gc.topk_sgd(axis_name="data", density=1 / 32, block=64, collective="all_gather"),
    "int8": lambda: gc.block_quantized(axis_name="data", block=64, collective="all_gather"),
}


@pytest.mark.parametrize("name", slow_but(("powersgd",), METHODS))
def test_the_result_is_that_of_one_bucket(name: str) -> None:
    """Bit for bit: codes work row by row, and each row is added up in the same order."""
    rng, make = np.random.default_rng(0), {**METHODS, **GATHERED}[name]
    plain, cut_up = make(), gc.bucketed(make(), bucket_bytes=BYTES)
    (state, step), (other, cut_step) = start(plain), start(cut_up)
    for _ in range(4):
        gradient = draw(rng)
        updates, state = step(gradient, state, params())
        expected, other = cut_step(gradient, other, params())
        for a, b in zip(jax.tree.leaves((updates, state)), jax.tree.leaves((expected, other)), strict=True):
            if name == "powersgd":
                # All matrices of a bucket are made orthonormal together, and rounded so.
                np.testing.assert_allclose(a, b, atol=1e-4)
            else:
                np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("dgc", "int8"))
def test_in_two_phases_the_workers_keep_as_much_between_them(name: str) -> None:
    """Other workers own the rows, and keep what rounding takes from them; the mean over the workers is the same."""
    rng = np.random.default_rng(3)
    results = [start(tx) for tx in (METHODS[name](), gc.bucketed(METHODS[name](), bucket_bytes=BYTES))]
    gradient = draw(rng)
    (updates, state), (expected, other) = (step(gradient, state, params()) for state, step in results)
    for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    pairs = zip(
        jax.tree.leaves(exchange_state(state).memory), jax.tree.leaves(exchange_state(other).memory), strict=True
    )
    for a, b in pairs:
        np.testing.assert_allclose(np.asarray(a).mean(axis=0), np.asarray(b).mean(axis=0), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("dgc", "int8, server", "powersgd"))
def test_a_bad_entry_in_any_bucket_skips_all(name: str) -> None:
    rng = np.random.default_rng(1)
    state, step = start(gc.bucketed(METHODS[name](), bucket_bytes=BYTES))
    _, state = step(draw(rng), state, params())
    for layer in SHAPES:
        bad = draw(rng)
        bad[layer]["kernel"][2, 3, 4] = np.nan
        updates, after = step(bad, state, params())
        assert not any(np.asarray(u).any() for u in jax.tree.leaves(updates)), layer
        inner, before = exchange_state(after), exchange_state(state)
        assert int(inner.skipped) == int(before.skipped) + 1
        for a, b in zip(jax.tree.leaves(inner.memory), jax.tree.leaves(before.memory), strict=True):
            np.testing.assert_array_equal(a, b)


def test_each_bucket_has_collectives_of_its_own() -> None:
    """As many all-to-alls as buckets with matrices, and the bytes of one, padding of rows to owners aside."""
    mesh = jax.make_mesh((N,), ("data",), devices=jax.devices()[:N])
    tx = gc.block_quantized(axis_name="data", block=64)

    def report(tx):
        return gc.wire_bytes(gc.lower_update(params(), tx, mesh).as_text(dialect="hlo"))

    whole, cut_up = report(tx).by("kind"), report(gc.bucketed(tx, bucket_bytes=BYTES)).by("kind")
    assert whole["all-to-all"].count == 1
    assert cut_up["all-to-all"].count == 3
    rows = 24 * 24 // 64
    padding = (3 * -(-rows // N) - -(-3 * rows // N)) * (N - 1) * (64 + 4)
    # In one bucket the biases cross with the rest; else they wait together for the last one, where nothing is compressed.
    biases = 3 * 24
    riding = (N - 1) * -(-biases // N) * 4
    assert cut_up["all-to-all"].sent == whole["all-to-all"].sent - riding + padding
    assert "all-reduce" not in whole
    assert cut_up["all-reduce"].sent == -(-2 * (N - 1) * (biases + 1) * 4 // N)


def test_leaves_go_in_the_reverse_of_the_forward_order() -> None:
    """Numbers in names count as numbers; a bucket is closed once it is full."""
    names = [
        jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in jax.tree_util.tree_leaves_with_path(params())
    ]
    got = [[names[i] for i in bucket] for bucket in buckets_of(params(), BYTES)]
    assert got == [
        ["layer_10/kernel"],
        ["layer_10/bias", "layer_2/kernel"],
        ["layer_2/bias", "layer_1/kernel"],
        ["layer_1/bias"],
    ]
    assert len(buckets_of(params(), 10**9)) == 1
    order = [n for layer in ("layer_2", "layer_10", "layer_1") for n in names if n.startswith(layer + "/")]
    assert [names[i] for i in buckets_of(params(), 1, order)[0]] == ["layer_1/kernel"]
    with pytest.raises(ValueError, match=r"forward_order lacks \['layer_1/bias'"):
        buckets_of(params(), 1, order[:4])


def test_the_forward_order_is_read_from_the_loss() -> None:
    """Casts of all parameters up front are no use of them; programs within programs are looked into."""

    @jax.jit
    def block(p, x):
        return jnp.tanh(x @ p["w"].T + p["b"])

    def loss(p, x):
        p = jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)
        x = block(p["z"], x.astype(jnp.bfloat16))
        x = jax.checkpoint(block)(p["m"], x)
        return jnp.sum(block(p["a"], x)).astype(jnp.float32)

    layer = {"b": np.zeros((4,), np.float32), "w": np.zeros((4, 4), np.float32)}
    got = gc.forward_order(
        loss, {"a": layer, "m": layer, "unused": np.zeros((2,), np.float32), "z": layer}, np.zeros((2, 4), np.float32)
    )
    assert got == ("z/w", "z/b", "m/w", "m/b", "a/w", "a/b", "unused")


def test_the_train_step_tells_the_order_of_its_loss() -> None:
    """Layers named against their order: the last one used has the first bucket."""
    mesh = jax.make_mesh((N,), ("data",), devices=jax.devices()[:N])
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append(buckets_of(updates, 1, context_of(extra).forward_order()))
        return updates, state

    spy = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    tx = optax.chain(spy, gc.bucketed(gc.dense(axis_name="data"), bucket_bytes=1), optax.sgd(0.1))
    start = {"a": np.ones((4, 4), np.float32), "b": np.ones((4, 4), np.float32)}
    state = gc.init_state(start, tx, mesh, axis_name="data")
    step = gc.make_train_step(lambda p, x: jnp.mean(jnp.tanh(x @ p["b"]) @ p["a"]), tx, mesh, axis_name="data")
    state, _ = step(state, jax.device_put(np.ones((8, 4), np.float32), gc.data_sharding(mesh)))
    assert seen[-1] == ((0,), (1,))


def test_within_a_hierarchy_all_collectives_come_in_buckets() -> None:
    mesh = jax.make_mesh((2, 2), ("slices", "chips"), devices=jax.devices()[:4])
    tx = gc.hierarchical(gc.block_quantized(axis_name="slices", block=64), axis_name="slices", inner_axis_name="chips")
    lowered = gc.lower_update(
        params(), gc.bucketed(tx, bucket_bytes=BYTES), mesh, axis_name=("slices", "chips")
    ).as_text(dialect="hlo")
    found = gc.wire_bytes(lowered).by("kind")
    assert found["reduce-scatter"].count == 4
    assert found["all-to-all"].count == 3


def test_a_bucket_is_at_least_a_byte() -> None:
    with pytest.raises(ValueError, match="bucket_bytes must be an integer of at least 1"):
        gc.bucketed(gc.dense(axis_name="data"), bucket_bytes=0)
