"""The networks of the studies that tell images apart."""

from collections.abc import Sequence

import jax
from flax import linen

from gradcomp_jax.experiments.models import CLASSIFIER, Model, from_linen


class _Mlp(linen.Module):
    """Dense layers of the given widths with ReLU between, then ``classes`` logits."""

    widths: Sequence[int]
    classes: int

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape((x.shape[0], -1))
        for width in self.widths:
            x = linen.relu(linen.Dense(width)(x))
        return linen.Dense(self.classes, name=CLASSIFIER)(x)


class _LeNet(linen.Module):
    """5x5x20 and 5x5x50 without padding, each with 2x2 maxima after it, dense 500, dense ``classes``."""

    classes: int

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for channels in (20, 50):
            x = linen.Conv(channels, (5, 5), padding="VALID")(x)
            # Faster on a CPU than ``max_pool``, whose gradient looks for the maximum again.
            x = x.reshape(-1, x.shape[1] // 2, 2, x.shape[2] // 2, 2, channels).max((2, 4))
        x = linen.relu(linen.Dense(500)(x.reshape((x.shape[0], -1))))
        return linen.Dense(self.classes, name=CLASSIFIER)(x)


class _CifarNet(linen.Module):
    """Two layers of 5x5 with 3x3 maxima of stride 2 after each, dense 384, dense 192, dense ``classes``; ReLU between."""

    width: int
    classes: int

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = _centred(x)
        for _ in range(2):
            x = linen.relu(linen.Conv(self.width, (5, 5))(x))
            x = linen.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        x = x.reshape((x.shape[0], -1))
        for wide in (384, 192):
            x = linen.relu(linen.Dense(wide)(x))
        return linen.Dense(self.classes, name=CLASSIFIER)(x)


class _ResNet(linen.Module):
    """Residual blocks of two 3x3 layers, at three sizes of image; group norms in the place of statistics over a batch."""

    width: int
    blocks: int
    classes: int

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.Conv(self.width, (3, 3), use_bias=False)(_centred(x))
        for stage in range(3):
            for block in range(self.blocks):
                stride = 2 if stage and not block else 1
                x = self._block(x, self.width << stage, stride)
        x = linen.relu(_norm(x)).mean((1, 2))
        return linen.Dense(self.classes, name=CLASSIFIER)(x)

    def _block(self, x: jax.Array, channels: int, stride: int) -> jax.Array:
        h = linen.relu(_norm(x))
        # The first layer of a stage has its own projection of what goes beside it.
        beside = x if x.shape[-1] == channels else linen.Conv(channels, (1, 1), (stride, stride), use_bias=False)(h)
        h = linen.Conv(channels, (3, 3), (stride, stride), use_bias=False)(h)
        return beside + linen.Conv(channels, (3, 3), use_bias=False)(linen.relu(_norm(h)))


def _norm(x: jax.Array) -> jax.Array:
    return linen.GroupNorm(num_groups=None, group_size=8)(x)


def _centred(x: jax.Array) -> jax.Array:
    """Images in [0, 1], about zero and of about the deviation one."""
    return 4 * (x - 0.5)


def mlp(image: tuple[int, int, int] = (28, 28, 1), widths: Sequence[int] = (512, 256), classes: int = 10) -> Model:
    """Returns a fully connected net; by default 784-512-256-10, 536 thousand parameters."""
    return from_linen(_Mlp(tuple(widths), classes), image)


def lenet() -> Model:
    """Returns LeNet for 28x28 images, 431 thousand parameters: that of Caffe, which TernGrad's authors train."""
    return from_linen(_LeNet(10), (28, 28, 1))


def cifar_net(width: int = 64) -> Model:
    """Returns a conv net for 32x32 images in colour.

    With 64 channels it is the one of TensorFlow's tutorial, without its normalization across channels, which TernGrad's authors
    train.
    """
    return from_linen(_CifarNet(width, 10), (32, 32, 3))


def resnet(width: int = 16, blocks: int = 1) -> Model:
    """Returns a residual net of ``6 * blocks + 2`` layers for 32x32 images in colour, normalization before each layer.

    References:
      He et al., 2016, https://arxiv.org/abs/1512.03385, section 4.2; order of the layers: https://arxiv.org/abs/1603.05027.
    """
    return from_linen(_ResNet(width, blocks, 10), (32, 32, 3))
