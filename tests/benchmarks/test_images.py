"""Networks of the studies: shapes and sizes."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.tasks import images

# Weights and biases of every layer, written out.
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
    [
        (images.mlp(), (28, 28, 1), MLP),
        (images.lenet(), (28, 28, 1), LENET),
        (images.cifar_net(), (32, 32, 3), CIFAR_NET),
        (images.resnet(), (32, 32, 3), RESNET),
    ],
    ids=["mlp", "lenet", "cifar_net", "resnet"],
)
def test_shapes_and_sizes(model, image, size):
    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == size
    batch = jax.ShapeDtypeStruct((3, *image), jnp.float32)
    assert jax.eval_shape(model.apply, params, batch).shape == (3, 10)
