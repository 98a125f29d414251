"""A decoder on the characters of enwik8, and its batches, which depend on a seed and a step alone."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.tasks import datasets
from gradcomp_jax.experiments.language_models import SMALL, Decoder

WORKERS = 8
TEXT = "enwik8"
JUDGED = 1 << 17
"""Characters of the validation and of the test part, from their start, that a model is judged by."""


MODELS = {"65k": SMALL, "859k": Decoder(width=128, layers=4, heads=4, length=128)}
"""By their parameters; the larger has 813,824, as its embeddings are tied."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A model and how much each worker sees in a step.

    Attributes:
      model: a name of ``MODELS``.
      sequences: of each worker in a step.
      lengths: of its runs in steps, the longest first.
      tuned_at: steps of the runs that a learning rate is chosen by, on the validation part, with the first seed.
      first: of a row's rates, the place of the one that is tried first.
      tunes: whether others are tried; a run of a larger model takes an hour.
      workers: how many there are.
      text: the data set's name.
    """

    model: str
    sequences: int
    lengths: tuple[int, ...] = (16_000, 4_000, 1_000)
    tuned_at: int = 4_000
    first: int = 2
    tunes: bool = True
    workers: int = WORKERS
    text: str = TEXT

    @property
    def name(self) -> str:
        """Returns the name of the folder of its results."""
        return f"{self.model}-{self.sequences}"


LARGE = Task("859k", 8, lengths=(2_100,), tuned_at=2_100, tunes=False)
"""20 characters a parameter."""

FOUR = Task("65k", 4, lengths=(4_000, 1_000))
"""Without the longest: a run of 16,000 steps takes half an hour."""

TASKS = {task.name: task for task in (Task("65k", 1), FOUR, LARGE)}


def vocabulary(name: str = TEXT) -> int:
    """Returns how many characters a text has."""
    return len(_text(name)[0])


@functools.cache
def parts(name: str = TEXT) -> dict[str, np.ndarray]:
    """Returns a text as numbers below :func:`vocabulary`, uint8, in its usual parts."""
    known, text = _text(name)
    numbers = np.zeros(256, np.uint8)
    numbers[known] = np.arange(len(known))
    return {part: numbers[getattr(text, part)] for part in ("train", "validation", "test")}


def batch_of(task: Task, text: jax.Array, key: jax.Array, step: jax.Array) -> jax.Array:
    """Returns the int32 ``[workers, sequences, length + 1]`` of a step, the same for every method."""
    length = MODELS[task.model].length + 1
    shape = (task.workers, task.sequences)
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
        sequences = parts(task.text)[part][windows].astype(np.int32).reshape(-1, 64, model.length + 1)
        return float(mean(params, sequences)) / math.log(2)

    return bits


@functools.cache
def _text(name: str) -> tuple[np.ndarray, Any]:
    text = datasets.load(name)
    return np.unique(text.train), text
