"""Data set, network and hyper-parameters that belong together.

The hyper-parameters are those of the dense run. Methods whose updates have another length take a fraction of the learning
rate, see ``registered.RATES``. The clipping threshold lets about nine in ten local gradients pass as they are.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from gradcomp_jax._errors import look_up
from gradcomp_jax.experiments import language_models, models
from gradcomp_jax.experiments.datasets import Data
from gradcomp_jax.experiments.problem import Problem, classification, language_modelling
from gradcomp_jax.experiments.settings import Settings


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One thing to train.

    Attributes:
      dataset: a name of ``datasets.SOURCES``.
      problem: ``problem(data, settings) -> Problem``.
      settings: what a run uses unless the user says otherwise.
      summary: one line for a person.
      name: what its results are called, where it is not the data set's name.
      methods: names of ``recipes.RECIPES`` that are compared unless the user names others.
      seeds: runs of each, likewise.
      note: what is said below the table of a comparison; empty for nothing.
    """

    dataset: str
    problem: Callable[[Any, Settings], Problem]
    settings: Settings
    summary: str
    name: str = ""
    methods: tuple[str, ...] = ("dense-bf16", "terngrad", "dgc")
    seeds: int = 5
    note: str = ""

    def on(self, data: Data) -> Problem:
        """Returns the task with its data, which a run needs."""
        return dataclasses.replace(self.problem(data, self.settings), name=self.name or self.dataset)


def task(name: str) -> Task:
    """Returns the task of a name: that of the data set, and what follows it where there are several on one.

    Raises:
      UnknownNameError: if there is no such task.
    """
    return look_up("task", name, TASKS)


NETWORKS: dict[str, models.Model] = {"digits": models.conv_net(), "fashion-mnist": models.mlp()}
"""Of the tasks that tell images apart."""

ENWIK8 = Task(
    "enwik8",
    functools.partial(
        language_modelling, language_models.transformer, metric="bits per character", steps=120, judged=1 << 16
    ),
    Settings(
        epochs=10,
        batch_per_worker=1,
        learning_rate=1e-3,
        density=0.01,
        clip_norm=1.0,
        warm_up_epochs=1,
        optimizer="adamw",
    ),
    "transformer of 859 thousand parameters on the characters of enwik8, with AdamW",
)
"""A task of which there is another with more steps."""

TASKS: dict[str, Task] = {
    "digits": Task(
        "digits",
        functools.partial(classification, NETWORKS["digits"]),
        Settings(epochs=30, batch_per_worker=8, learning_rate=0.05, density=0.01, clip_norm=8.0, warm_up_epochs=2),
        "conv net of 38 thousand parameters on scikit-learn's 8x8 digits",
    ),
    "language-model": Task(
        "standard-library",
        functools.partial(
            language_modelling, language_models.decoder, metric="bits per character", steps=500, judged=1 << 16
        ),
        dataclasses.replace(ENWIK8.settings, epochs=5, learning_rate=6e-3, schedule="cosine", density=0.02),
        "decoder of 62 thousand parameters on the source of Python's standard library, with AdamW",
        name="language-model",
        methods=("dense-bf16", "block-quantized-4-bit", "sparse-adamw"),
        seeds=1,
        note="gap to dense: it falls with the length of training; docs/results/protocol.md has longer runs of such a model.",
    ),
    "fashion-mnist": Task(
        "fashion-mnist",
        functools.partial(classification, NETWORKS["fashion-mnist"]),
        Settings(epochs=6, batch_per_worker=16, learning_rate=0.02, density=0.001, clip_norm=8.0, warm_up_epochs=0.5),
        "MLP 784-512-256-10 on Fashion-MNIST",
    ),
    "mnist": Task(
        "mnist",
        functools.partial(classification, models.lenet()),
        Settings(epochs=2, batch_per_worker=8, learning_rate=0.02, density=0.001, clip_norm=16.0, warm_up_epochs=0.25),
        "LeNet of 431 thousand parameters on MNIST",
    ),
    "cifar10": Task(
        "cifar10",
        functools.partial(classification, models.resnet()),
        Settings(
            epochs=8,
            batch_per_worker=8,
            learning_rate=0.1,
            schedule="linear",
            density=0.001,
            clip_norm=8.0,
            warm_up_epochs=0.5,
        ),
        "residual net of 78 thousand parameters on CIFAR-10",
    ),
    "cifar10-conv": Task(
        "cifar10",
        functools.partial(classification, models.cifar_net(32)),
        Settings(
            epochs=8,
            batch_per_worker=8,
            learning_rate=0.02,
            schedule="linear",
            density=0.001,
            clip_norm=22.0,
            warm_up_epochs=0.5,
        ),
        "conv net of 891 thousand parameters on CIFAR-10",
        name="cifar10-conv",
    ),
    "penn-treebank": Task(
        "penn-treebank",
        # As many tokens as the training part has, in the batches of Zaremba et al.
        functools.partial(language_modelling, language_models.lstm, metric="perplexity", steps=1328, judged=1 << 20),
        Settings(
            workers=4,
            epochs=6,
            batch_per_worker=5,
            learning_rate=1.0,
            schedule="linear",
            density=0.001,
            clip_norm=1.6,
            warm_up_epochs=0.25,
        ),
        "LSTM of 4.7 million parameters on the words of Penn Treebank",
    ),
    "enwik8": ENWIK8,
    "enwik8-long": dataclasses.replace(
        ENWIK8,
        settings=dataclasses.replace(ENWIK8.settings, epochs=2 * ENWIK8.settings.epochs),
        summary=f"{ENWIK8.summary}, twice the steps",
        name="enwik8-long",
    ),
}
