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
    """Returns the task of a name: that of the data set, and what follows it where there are several on one."""
    return look_up("task", name, TASKS)


TASKS: dict[str, Task] = {
    "digits": Task(
        "digits",
        functools.partial(classification, models.conv_net()),
        Settings(epochs=30, batch_per_worker=8, learning_rate=0.05, density=0.01, clip_norm=8.0, warm_up_epochs=2),
        "conv net of 38 thousand parameters on scikit-learn's 8x8 digits",
    ),
    "language-model": Task(
        "standard-library",
        functools.partial(
            language_modelling, language_models.decoder, metric="bits per character", steps=500, judged=1 << 16
        ),
        Settings(
            epochs=5,
            batch_per_worker=1,
            learning_rate=6e-3,
            schedule="cosine",
            density=0.02,
            clip_norm=1.0,
            warm_up_epochs=1,
            optimizer="adamw",
        ),
        "decoder of 62 thousand parameters on the source of Python's standard library, with AdamW",
        name="language-model",
        methods=("dense-bf16", "block-quantized-4-bit", "sparse-adamw"),
        seeds=1,
        note="gap to dense: it falls with the length of training; docs/results/protocol.md has longer runs of such a model.",
    ),
}
