"""Gradients that are still each worker's own, under every way to map an axis."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc

N = 8


def loss(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def params():
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(3, 2)).astype(np.float32), "b": np.float32([0.5, -1])}


def batches() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(N, 4, 3)).astype(np.float32)


def each_worker_alone():
    return jax.jit(jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0)))(params(), batches())


def check(values, gradients) -> None:
    expected_values, expected = each_worker_alone()
    np.testing.assert_allclose(values, expected_values, rtol=1e-5)
    for name in expected:
        np.testing.assert_allclose(gradients[name], expected[name], rtol=1e-4, atol=1e-5)
    # Not the mean in disguise.
    assert np.asarray(gradients["w"]).std(axis=0).min() > 1e-2


local = gc.local_value_and_grad(loss, axis_name="data")


@pytest.mark.parametrize("check_vma", (True, False))
def test_shard_map(mesh8, check_vma: bool) -> None:
    def one(p, x):
        value, gradient = local(p, x[0])
        return value[None], jax.tree.map(lambda g: g[None], gradient)

    mapped = jax.shard_map(one, mesh=mesh8, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=check_vma)
    compiled = jax.jit(mapped)
    check(*compiled(params(), batches()))
    assert "all-reduce" not in compiled.lower(params(), batches()).compile().as_text()


def test_pmap() -> None:
    check(*jax.pmap(local, axis_name="data", in_axes=(None, 0))(params(), batches()))


def test_vmap() -> None:
    check(*jax.jit(jax.vmap(local, axis_name="data", in_axes=(None, 0)))(params(), batches()))


def test_no_axis() -> None:
    value, gradient = jax.jit(gc.local_value_and_grad(loss, axis_name=None))(params(), batches()[0])
    expected = jax.jit(jax.value_and_grad(loss))(params(), batches()[0])
    np.testing.assert_array_equal(value, expected[0])
    chex.assert_trees_all_equal(gradient, expected[1])


def test_aux_and_keywords() -> None:
    def with_aux(p, x, *, scale):
        return scale * loss(p, x), {"rows": jnp.float32(x.shape[0])}

    value_and_grad = gc.local_value_and_grad(with_aux, axis_name="data", has_aux=True)
    mapped = jax.vmap(lambda x: value_and_grad(params(), x, scale=2.0), axis_name="data")
    (values, aux), gradients = jax.jit(mapped)(batches())
    check(np.asarray(values) / 2, jax.tree.map(lambda g: np.asarray(g) / 2, gradients))
    np.testing.assert_array_equal(aux["rows"], np.full(N, 4))


def test_a_plain_gradient_is_summed_and_refused(mesh8) -> None:
    """What local_value_and_grad is for: with check_vma=True the plain one is N times the mean already."""
    tx = gc.exchange(gc.compressors.dense(), axis_name="data", memory=gc.memory.none())

    def plain(p, x):
        return jax.grad(loss)(p, x[0])

    def exchanged(p, x):
        return tx.update(plain(p, x), tx.init(p))[0]

    def on(f):
        return jax.jit(jax.shard_map(f, mesh=mesh8, in_specs=(P(), P("data")), out_specs=P()))

    summed = on(plain)(params(), batches())
    expected = each_worker_alone()[1]
    for name in expected:
        np.testing.assert_allclose(summed[name], np.sum(expected[name], axis=0), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"(?s)already reduced over 'data'.*local_value_and_grad.*pcast"):
        on(exchanged)(params(), batches())
