"""The network: shapes, sizes, and the loss against its definition."""

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp_jax.experiments import models

# Weights and biases of every layer, written out.
CONV_NET = (9 * 16 + 16) + (9 * 16 * 32 + 32) + (4 * 4 * 32 * 64 + 64) + (64 * 10 + 10)


def test_shapes_and_sizes():
    model, image, size = models.conv_net(), (8, 8, 1), CONV_NET
    params = jax.jit(model.init)(jax.random.key(0))
    leaves = jax.tree.leaves(params)
    assert sum(leaf.size for leaf in leaves) == size
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}
    logits = jax.jit(model.apply)(params, np.ones((3, *image), np.float32))
    assert logits.shape == (3, 10)
    assert logits.dtype == jnp.float32


def test_init_depends_on_the_key_alone():
    init = jax.jit(models.conv_net().init)
    one, same, other = (jax.tree.leaves(init(jax.random.key(k))) for k in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_cross_entropy_is_the_mean_negative_log_probability():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 10)).astype(np.float32)
    labels = rng.integers(0, 10, 5).astype(np.int32)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = -np.mean(np.log(probabilities[np.arange(5), labels]))
    np.testing.assert_allclose(jax.jit(models.cross_entropy)(logits, labels), expected, rtol=1e-6)
