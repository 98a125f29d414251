"""Leaves that float32 does not hold are refused by whatever would cast them, and named; with x64 all else is as without."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import gradcomp_jax as gc
from gradcomp_jax.methods.registry import METHODS
from tests.conformance.environments import AXIS, vmapped_init

N = 2
slow = pytest.mark.slow
REMEDY = r"'w' is float64, and what crosses and what is kept is float32: cast .*optax.stateless.*multi_transform"


def dense() -> Any:
    return gc.dense(axis_name=AXIS)


def replicas(tx: Any) -> Any:
    return optax.chain(optax.sgd(0.1), tx)


AROUND = {
    "exchange": dense,
    "dense_bf16": lambda: gc.dense(axis_name=AXIS, dtype=jnp.bfloat16),
    "ef21": lambda: gc.ef21(axis_name=AXIS, density=0.5),
    "one_bit_adam": lambda: gc.one_bit_adam(axis_name=AXIS, warm_up_steps=1),
    "dion": lambda: gc.dion(axis_name=AXIS),
    "local_clip": lambda: optax.chain(gc.local_clip(1.0, axis_name=AXIS), dense()),
    "weighted": lambda: gc.weighted(dense(), axis_name=AXIS),
    "rate_weighted": lambda: gc.rate_weighted(gc.topk_sgd(axis_name=AXIS, density=0.5), lambda step: 0.1),
    "bucketed": lambda: gc.bucketed(dense(), bucket_bytes=8),
    "switched": lambda: gc.switched({"a": dense(), "b": gc.terngrad(axis_name=AXIS)}),
    "master_weights": lambda: gc.master_weights(dense()),
    "dynamic_loss_scale": lambda: gc.dynamic_loss_scale(dense()),
    "accumulate": lambda: gc.accumulate(dense(), axis_name=AXIS, every=2),
    "delayed_average": lambda: gc.delayed_average(dense(), axis_name=AXIS, delay=1),
    "delayed_average, uncompensated": lambda: gc.delayed_average(dense(), axis_name=AXIS, delay=1, compensate=False),
    "elastic_average": lambda: replicas(gc.elastic_average(dense(), axis_name=AXIS)),
    "gossip": lambda: replicas(gc.gossip(axis_name=AXIS)),
    "local_sgd": lambda: replicas(gc.local_sgd(dense(), axis_name=AXIS, every=2)),
    "diloco": lambda: replicas(gc.diloco(dense(), axis_name=AXIS, every=2)),
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float64") for name in AROUND), ("exchange", "complex128"), ("gossip", "complex128")]
)
def test_a_wide_leaf_is_refused_with_the_remedy(name: str, dtype: str) -> None:
    """By init or by update, and never cast."""
    with jax.enable_x64(True), pytest.raises(TypeError, match=REMEDY if dtype == "float64" else "complex128"):
        params, tx = {"w": jax.ShapeDtypeStruct((64, 64), dtype)}, AROUND[name]()

        def run(p: Any, g: Any) -> Any:
            return optax.with_extra_args_support(tx).update(g, tx.init(p), p, **more)[0]

        more = {"weight": 1.0} if name == "weighted" else {}
        jax.eval_shape(
            jax.vmap(run, in_axes=(None, 0), axis_name=AXIS), params, {"w": jax.ShapeDtypeStruct((N, 64, 64), dtype)}
        )


def test_a_hierarchy_refuses_it_too() -> None:
    tx = gc.hierarchical(gc.dense(axis_name="outer"), axis_name="outer", inner_axis_name="inner")
    with jax.enable_x64(True), pytest.raises(TypeError, match=REMEDY):
        w = {"w": jax.ShapeDtypeStruct((2, 2, 4), jnp.float64)}
        both = jax.vmap(jax.vmap(lambda g: tx.update(g, tx.init(g), g)[0], axis_name="inner"), axis_name="outer")
        jax.eval_shape(both, w)


def test_gathered_parameters_are_refused_where_they_would_be_cast() -> None:
    specs, int8 = {"w": PartitionSpec(AXIS)}, gc.compressors.block_quantized(bits=8, block=16)

    def gathered(dtype: Any, compressor: Any) -> Any:
        gather = lambda p: gc.gather_params(p, specs, axis_name=AXIS, compressor=compressor)  # noqa: E731
        shards = {"w": jax.ShapeDtypeStruct((N, 8, 16), dtype)}
        return jax.eval_shape(jax.vmap(gather, axis_name=AXIS), shards)["w"].dtype

    with jax.enable_x64(True):
        with pytest.raises(TypeError, match=REMEDY):
            gathered(jnp.float64, int8)
        whole = np.random.default_rng(0).normal(size=(N, 8, 16))
        gather = lambda p: gc.gather_params(p, specs, axis_name=AXIS, compressor=gc.compressors.dense())  # noqa: E731
        came = jax.jit(jax.vmap(gather, axis_name=AXIS, out_axes=None))({"w": whole})["w"]
        np.testing.assert_array_equal(np.asarray(came), whole.reshape(N * 8, 16))
        assert gathered(jnp.float32, int8) == jnp.float32


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_the_remedy_trains_wide_parameters() -> None:
    """Gradients cast by a link before the exchange; parameters and their sum stay float64."""
    with jax.enable_x64(True):
        narrow = optax.stateless(lambda g, _: jax.tree.map(lambda x: x.astype("float32"), g))
        tx = optax.chain(narrow, gc.dense(axis_name=None), optax.sgd(1.0))
        params = {"w": jnp.ones((2, 2), jnp.float64)}
        moved, _ = jax.jit(tx.update)({"w": jnp.full((2, 2), 2.0**-30, jnp.float64)}, tx.init(params), params)
        assert moved["w"].dtype == jnp.float32
        new = optax.apply_updates(params, moved)["w"]
        assert new.dtype == jnp.float64 and (np.asarray(new) == 1 - 2.0**-30).all()


@slow
@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", ("dgc", "one_bit_adam", "powersgd", "terngrad"))
def test_with_x64_narrower_leaves_keep_their_dtypes(name: str) -> None:
    with jax.enable_x64(True):
        tx = METHODS[name].build(axis_name=AXIS)
        params = {"w": np.zeros((32, 32), np.float32), "b": np.zeros(5, np.float32)}
        state = vmapped_init(tx, params, N)
        axes = gc.state_axes(state)
        update = jax.vmap(tx.update, in_axes=(0, axes, None), out_axes=(0, axes), axis_name=AXIS)
        gradient = {k: jax.ShapeDtypeStruct((N, *p.shape), p.dtype) for k, p in params.items()}
        moved, after = jax.eval_shape(update, gradient, state, params)
        assert all(m.dtype == jnp.float32 for m in jax.tree.leaves(moved))
        assert [a.dtype for a in jax.tree.leaves(after)] == [a.dtype for a in jax.tree.leaves(state)]
