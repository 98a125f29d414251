"""A decoder on the characters of enwik8, and its batches, which depend on a seed and a step alone."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp_jax.experiments import datasets

WORKERS = 8
JUDGED = 1 << 17
"""Characters of the validation and of the test part, from their start, that a model is judged by."""


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A decoder without biases, with tied embeddings and rotary places.

    Attributes:
      width: of the residual stream.
      layers: of attention and two dense layers each.
      heads: of attention.
      length: characters of a sequence.
    """

    width: int
    layers: int
    heads: int
    length: int

    @property
    def summary(self) -> str:
        """Returns a line on it."""
        return f"a decoder {self.width} wide, {self.layers} layers, on {self.length} characters of enwik8"

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

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Returns the mean cross-entropy in nats of int32 ``[sequences, length + 1]``."""
        x = params["embedding"][tokens[:, :-1]]
        for i in range(self.layers):
            h = _normed(x, params[f"{i}/norm_1"])
            shape = (*h.shape[:-1], self.heads, self.width // self.heads)
            query, key, value = ((h @ params[f"{i}/{name}"]).reshape(shape) for name in ("query", "key", "value"))
            seen = jax.nn.dot_product_attention(_turned(query), _turned(key), value, is_causal=True)
            x = x + seen.reshape(h.shape) @ params[f"{i}/out"]
            h = _normed(x, params[f"{i}/norm_2"])
            x = x + jax.nn.gelu(h @ params[f"{i}/up"]) @ params[f"{i}/down"]
        logits = _normed(x, params["norm"]) @ params["embedding"].T
        named = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - named)


MODELS = {"65k": Model(48, 2, 4, 64), "859k": Model(128, 4, 4, 128)}
"""By their parameters; the larger has 813,824, as its embeddings are tied."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A model and how much each worker sees in a step.

    Attributes:
      model: a name of ``MODELS``.
      sequences: of each worker in a step.
    """

    model: str
    sequences: int

    @property
    def name(self) -> str:
        """Returns the name of the folder of its results."""
        return f"{self.model}-{self.sequences}"


TASKS = {task.name: task for task in (Task("65k", 1), Task("65k", 4), Task("859k", 8))}


def vocabulary() -> int:
    """Returns how many characters there are."""
    return len(_text()[0])


@functools.cache
def parts() -> dict[str, np.ndarray]:
    """Returns the text as numbers below :func:`vocabulary`, uint8, in its usual parts."""
    known, text = _text()
    numbers = np.zeros(256, np.uint8)
    numbers[known] = np.arange(len(known))
    return {part: numbers[getattr(text, part)] for part in ("train", "validation", "test")}


def batch_of(task: Task, text: jax.Array, key: jax.Array, step: jax.Array) -> jax.Array:
    """Returns the int32 ``[workers, sequences, length + 1]`` of a step, the same for every method."""
    length = MODELS[task.model].length + 1
    shape = (WORKERS, task.sequences)
    starts = jax.random.randint(jax.random.fold_in(key, step), shape, 0, text.shape[0] - length)
    return text[starts[..., None] + jnp.arange(length)].astype(jnp.int32)


def judge(task: Task) -> Callable[[Any, str], float]:
    """Returns ``judge(params, part)``: bits per character on the beginning of a part."""
    model = MODELS[task.model]
    count = JUDGED // model.length
    windows = np.arange(count)[:, None] * model.length + np.arange(model.length + 1)

    @jax.jit
    def mean(params: Any, sequences: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.map(lambda tokens: model.loss(params, tokens), sequences))

    def bits(params: Any, part: str) -> float:
        sequences = parts()[part][windows].astype(np.int32).reshape(-1, 64, model.length + 1)
        return float(mean(params, sequences)) / math.log(2)

    return bits


@functools.cache
def _text() -> tuple[np.ndarray, Any]:
    text = datasets.load("enwik8")
    return np.unique(text.train), text


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _turned(x: jax.Array) -> jax.Array:
    """Rotary places."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[-3])[:, None] * 10_000.0 ** -(jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
