"""What a run trains: initial parameters, a loss, batches, and what the network is judged by."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp_jax.experiments import models
from gradcomp_jax.experiments.datasets import Dataset
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
