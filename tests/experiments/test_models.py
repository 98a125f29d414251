"""Networks: shapes, sizes, and the loss against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp_jax.experiments import models

# Weights and biases of every layer, written out.
CONV_NET = (9 * 16 + 16) + (9 * 16 * 32 + 32) + (4 * 4 * 32 * 64 + 64) + (64 * 10 + 10)
MLP = (784 * 512 + 512) + (512 * 256 + 256) + (256 * 10 + 10)
LENET = (25 * 20 + 20) + (25 * 20 * 50 + 50) + (4 * 4 * 50 * 500 + 500) + (500 * 10 + 10)
CIFAR_NET = (75 * 64 + 64) + (25 * 64 * 64 + 64) + (8 * 8 * 64 * 384 + 384) + (384 * 192 + 192) + (192 * 10 + 10)
# Layers of 3x3, projections where the channels change, scales and offsets of the norms before each.
RESNET = (
    (27 * 16 + 2 * 9 * 16 * 16 + (9 * 16 * 32 + 9 * 32 * 32 + 16 * 32) + (9 * 32 * 64 + 9 * 64 * 64 + 32 * 64))
    + 2 * (16 + 16 + 16 + 32 + 32 + 64 + 64)
    + (64 * 10 + 10)
)


@pytest.mark.parametrize(
    ("model", "image", "size"),
    [(models.conv_net(), (8, 8, 1), CONV_NET), (models.mlp(), (28, 28, 1), MLP)],
    ids=["conv_net", "mlp"],
)
def test_shapes_and_sizes(model, image, size):
    params = jax.jit(model.init)(jax.random.key(0))
    leaves = jax.tree.leaves(params)
    assert sum(leaf.size for leaf in leaves) == size
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}
    logits = jax.jit(model.apply)(params, np.ones((3, *image), np.float32))
    assert logits.shape == (3, 10)
    assert logits.dtype == jnp.float32


@pytest.mark.parametrize(
    ("model", "image", "size"),
    [
        (models.lenet(), (28, 28, 1), LENET),
        (models.cifar_net(), (32, 32, 3), CIFAR_NET),
        (models.resnet(), (32, 32, 3), RESNET),
    ],
    ids=["lenet", "cifar_net", "resnet"],
)
def test_shapes_and_sizes_of_the_papers_nets(model, image, size):
    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == size
    images = jax.ShapeDtypeStruct((3, *image), jnp.float32)
    assert jax.eval_shape(model.apply, params, images).shape == (3, 10)


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
