"""A network that predicts the next token of a text."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, slots=True)
class LanguageModel:
    """A network as two functions of explicit parameters.

    Attributes:
      init: ``init(key) -> params``, a tree of float32 arrays.
      apply: ``apply(params, tokens) -> logits``; int32 ``[batch, length]`` in, float32 ``[batch, length, vocabulary]`` out.
        The logits at a place depend on the tokens up to it.
      length: tokens of a sequence that it is trained on.
    """

    init: Callable[[jax.Array], Any]
    apply: Callable[[Any, jax.Array], jax.Array]
    length: int


def turned(x: jax.Array) -> jax.Array:
    """Turns pairs of entries by angles that grow with the place (rotary places), so that products know distances alone."""
    half = x.shape[-1] // 2
    speeds = 10_000.0 ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[-3], dtype=jnp.float32)[:, None] * speeds
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


@dataclasses.dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder without biases, with tied embeddings and rotary places.

    Attributes:
      width: of the residual stream.
      layers: of attention and two dense layers each.
      heads: of attention.
      length: tokens of a sequence.
    """

    width: int
    layers: int
    heads: int
    length: int

    @property
    def summary(self) -> str:
        """Returns a few words on it."""
        return f"a decoder {self.width} wide, {self.layers} layers"

    def init(self, key: jax.Array, vocabulary: int) -> dict[str, jax.Array]:
        """Returns float32 parameters; matrices that end a residual branch begin smaller, as the branches are added up."""
        keys = iter(jax.random.split(key, 6 * self.layers + 1))
        params = {
            "embedding": 0.02 * jax.random.normal(next(keys), (vocabulary, self.width)),
            "norm": jnp.ones(self.width),
        }
        last = 0.02 / math.sqrt(2 * self.layers)
        for i in range(self.layers):
            for name in ("query", "key", "value", "out"):
                scale = last if name == "out" else 0.02
                params[f"{i}/{name}"] = scale * jax.random.normal(next(keys), (self.width, self.width))
            params[f"{i}/up"] = 0.02 * jax.random.normal(next(keys), (self.width, 4 * self.width))
            params[f"{i}/down"] = last * jax.random.normal(next(keys), (4 * self.width, self.width))
            params |= {f"{i}/{name}": jnp.ones(self.width) for name in ("norm_1", "norm_2")}
        return params

    def apply(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Returns float32 logits ``[sequences, length, vocabulary]`` of int32 ``[sequences, length]``."""
        x = params["embedding"][tokens]
        for i in range(self.layers):
            h = _normed(x, params[f"{i}/norm_1"])
            shape = (*h.shape[:-1], self.heads, self.width // self.heads)
            query, key, value = ((h @ params[f"{i}/{name}"]).reshape(shape) for name in ("query", "key", "value"))
            seen = jax.nn.dot_product_attention(turned(query), turned(key), value, is_causal=True)
            x = x + seen.reshape(h.shape) @ params[f"{i}/out"]
            h = _normed(x, params[f"{i}/norm_2"])
            x = x + jax.nn.gelu(h @ params[f"{i}/up"]) @ params[f"{i}/down"]
        return _normed(x, params["norm"]) @ params["embedding"].T

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Returns the mean cross-entropy in nats of int32 ``[sequences, length + 1]``."""
        logits = self.apply(params, tokens[:, :-1])
        named = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - named)


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


SMALL = Decoder(width=48, layers=2, heads=4, length=64)
"""About 60 thousand parameters: 48 for each token, and 55,536."""


def decoder(vocabulary: int, *, model: Decoder = SMALL) -> LanguageModel:
    """Returns a :class:`Decoder` for a vocabulary."""
    return LanguageModel(lambda key: model.init(key, vocabulary), model.apply, model.length)
