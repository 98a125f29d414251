"""What a run trains: initial parameters, a loss, batches, and what the network is judged by."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp_jax.experiments import models
from gradcomp_jax.experiments.datasets import Dataset, Text
from gradcomp_jax.experiments.language_models import LanguageModel
from gradcomp_jax.experiments.results import Metric
from gradcomp_jax.experiments.settings import Settings


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One thing to train, whatever the method and the settings.

    Attributes:
      name: of the data set, or of the user's function.
      settings: what a run uses unless the user says otherwise.
      init: ``init(seed) -> params``.
      loss: ``loss(params, batch) -> scalar``, the mean over the batch that it sees.
      steps_per_epoch: ``steps_per_epoch(settings)``, batches in an epoch.
      batches: ``batches(settings, seed, epoch)``: an epoch's batches, of all workers together, as trees of NumPy arrays.
      evaluate: ``evaluate(params)``: the metric; None where it is the mean loss of the epoch's steps.
      metric: what ``evaluate`` returns.
      has_seeds: whether parameters or batches depend on the seed.
    """

    name: str
    settings: Settings
    init: Callable[[int], Any]
    loss: Callable[[Any, Any], jax.Array]
    steps_per_epoch: Callable[[Settings], int]
    batches: Callable[[Settings, int, int], Iterable[Any]]
    evaluate: Callable[[Any], float] | None
    metric: Metric
    has_seeds: bool = True


def classification(model: models.Model, dataset: Dataset, settings: Settings) -> Problem:
    """Returns the problem of telling the classes of a data set's images apart.

    The order of the examples depends on the seed and the epoch alone.
    """

    def loss(params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        images, labels = batch
        return models.cross_entropy(model.apply(params, images), labels)

    def batches(settings: Settings, seed: int, epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = np.random.default_rng([seed, epoch]).permutation(len(dataset.train_x))
        for index in range(settings.steps_per_epoch(len(order))):
            examples = order[index * settings.batch : (index + 1) * settings.batch]
            yield dataset.train_x[examples], dataset.train_y[examples]

    @jax.jit
    def count_correct(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        predicted = jnp.argmax(model.apply(params, images), axis=-1)
        return jnp.sum(predicted.astype(labels.dtype) == labels)

    return Problem(
        name=dataset.name,
        settings=settings,
        init=lambda seed: model.init(jax.random.key(seed)),
        loss=loss,
        steps_per_epoch=lambda settings: settings.steps_per_epoch(len(dataset.train_x)),
        batches=batches,
        evaluate=lambda params: int(count_correct(params, dataset.test_x, dataset.test_y)) / len(dataset.test_y),
        metric="accuracy",
    )


def language_modelling(
    make: Callable[[int], LanguageModel],
    text: Text,
    settings: Settings,
    *,
    metric: Literal["bits per character", "perplexity"],
    steps: int,
    judged: int,
) -> Problem:
    """Returns the problem of predicting the next token of a text.

    A batch is sequences from random places, which depend on the seed and the epoch alone. Of every sequence of the test part,
    whose sequences do not overlap, all tokens count.

    Args:
      make: makes the network for a vocabulary.
      text: the data.
      settings: what a run uses unless the user says otherwise.
      metric: the mean cross-entropy in bits, or what e to its power in nats is.
      steps: of an epoch.
      judged: tokens of the test part, from its start, that the network is judged by; at most all of them.
    """
    model = make(text.vocabulary)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return models.cross_entropy(model.apply(params, tokens[:, :-1]), tokens[:, 1:])

    def batches(settings: Settings, seed: int, epoch: int) -> Iterator[np.ndarray]:
        random = np.random.default_rng([seed, epoch])
        for _ in range(steps):
            starts = random.integers(0, len(text.train) - model.length, settings.batch)
            yield text.train[starts[:, None] + np.arange(model.length + 1)].astype(np.int32)

    count = min(judged, len(text.test) - 1) // model.length
    windows = np.arange(count)[:, None] * model.length + np.arange(model.length + 1)
    sequences = text.test[windows].astype(np.int32)
    judge = jax.jit(loss)

    def evaluate(params: Any) -> float:
        parts = np.array_split(sequences, max(1, count // 64))
        mean = sum(len(part) * float(judge(params, part)) for part in parts) / count
        return mean / math.log(2) if metric == "bits per character" else math.exp(min(mean, 700.0))

    return Problem(
        name=text.name,
        settings=settings,
        init=lambda seed: model.init(jax.random.key(seed)),
        loss=loss,
        steps_per_epoch=lambda settings: steps,
        batches=batches,
        evaluate=evaluate,
        metric=metric,
    )
