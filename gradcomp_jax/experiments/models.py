"""The network of the digits, and its loss."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import linen

Params: TypeAlias = Any


CLASSIFIER = "classifier"
"""Name of the last layer of every model here."""


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A network as two functions of explicit parameters.

    Attributes:
      init: ``init(key) -> params``, a tree of float32 arrays.
      apply: ``apply(params, images) -> logits``; float32 ``[batch, height, width, channels]`` in,
        float32 ``[batch, classes]`` out.
    """

    init: Callable[[jax.Array], Params]
    apply: Callable[[Params, jax.Array], jax.Array]


class _ConvNet(linen.Module):
    """3x3x16, 3x3x32 with stride 2, dense 64, dense ``classes``; ReLU between."""

    classes: int

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.relu(linen.Conv(16, (3, 3))(x))
        x = linen.relu(linen.Conv(32, (3, 3), strides=(2, 2))(x))
        x = x.reshape((x.shape[0], -1))
        x = linen.relu(linen.Dense(64)(x))
        return linen.Dense(self.classes, name=CLASSIFIER)(x)


def conv_net(image: tuple[int, int, int] = (8, 8, 1), classes: int = 10) -> Model:
    """Returns a conv net of 38 thousand parameters for 8x8 images."""
    return from_linen(_ConvNet(classes), image)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy, in nats.

    Args:
      logits: float32 ``[..., classes]``.
      labels: int32 ``[...]``.
    """
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def from_linen(module: linen.Module, image: tuple[int, int, int]) -> Model:
    """Returns a flax module as functions, for images of ``(height, width, channels)``."""

    def init(key: jax.Array) -> Params:
        return module.init(key, jnp.zeros((1, *image), jnp.float32))["params"]

    def apply(params: Params, images: jax.Array) -> jax.Array:
        return module.apply({"params": params}, images)  # type: ignore[return-value]

    return Model(init, apply)
