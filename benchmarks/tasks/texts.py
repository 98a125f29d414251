"""The networks of the studies that predict the next token of a text."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from gradcomp_jax.experiments.language_models import LanguageModel, turned


class _Block(linen.Module):
    """Attention and two dense layers, each after a layer norm and beside a residual connection."""

    heads: int

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        h = linen.LayerNorm()(x)
        shape = (*h.shape[:-1], self.heads, width // self.heads)
        query, key, value = (linen.Dense(width, name=name)(h).reshape(shape) for name in ("query", "key", "value"))
        seen = jax.nn.dot_product_attention(turned(query), turned(key), value, is_causal=True).reshape(h.shape)
        x = x + linen.Dense(width, name="out")(seen)
        h = linen.Dense(4 * width, name="up")(linen.LayerNorm()(x))
        return x + linen.Dense(width, name="down")(linen.gelu(h))


class _Transformer(linen.Module):
    vocabulary: int
    width: int
    layers: int
    heads: int

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        small = linen.initializers.normal(0.02)
        x = linen.Embed(self.vocabulary, self.width, embedding_init=small, name="embedding")(tokens)
        for i in range(self.layers):
            x = _Block(self.heads, name=f"block_{i}")(x)
        return linen.Dense(self.vocabulary, use_bias=False, name="head")(linen.LayerNorm()(x))


def transformer(
    vocabulary: int, *, width: int = 128, layers: int = 4, heads: int = 4, length: int = 128
) -> LanguageModel:
    """Returns a decoder with layer norms first and rotary places; 859 thousand parameters for 256 tokens."""
    return _from_linen(_Transformer(vocabulary, width, layers, heads), length)


def _near_zero(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.uniform(key, shape, dtype, -0.1, 0.1)


class _Lstm(linen.Module):
    vocabulary: int
    width: int
    layers: int

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = linen.Embed(self.vocabulary, self.width, embedding_init=_near_zero, name="embedding")(tokens)
        # Zeros that vary by worker as the words do, where shard_map keeps account of what does.
        zero = 0 * x[:, 0]
        for i in range(self.layers):
            x = linen.RNN(linen.OptimizedLSTMCell(self.width), name=f"lstm_{i}")(x, initial_carry=(zero, zero))
        return linen.Dense(self.vocabulary, name="head")(x)


def lstm(vocabulary: int, *, width: int = 200, layers: int = 2, length: int = 35) -> LanguageModel:
    """Returns layers of LSTM over sequences that each start from zeros.

    The defaults are the small configuration of Zaremba et al., 2014, https://arxiv.org/abs/1409.2329, section 4.1.
    """
    return _from_linen(_Lstm(vocabulary, width, layers), length)


def _from_linen(module: linen.Module, length: int) -> LanguageModel:
    def init(key: jax.Array) -> Any:
        return module.init(key, jnp.zeros((1, length), jnp.int32))["params"]

    def apply(params: Any, tokens: jax.Array) -> jax.Array:
        return module.apply({"params": params}, tokens)  # type: ignore[return-value]

    return LanguageModel(init, apply, length)
