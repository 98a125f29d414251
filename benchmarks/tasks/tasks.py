"""Data set, network and hyper-parameters of the studies."""

import dataclasses
import functools

from benchmarks.tasks import images, texts
from gradcomp_jax._errors import look_up
from gradcomp_jax.experiments import models, tasks
from gradcomp_jax.experiments.problem import classification, language_modelling
from gradcomp_jax.experiments.settings import Settings
from gradcomp_jax.experiments.tasks import Task

NETWORKS: dict[str, models.Model] = {"digits": models.conv_net(), "fashion-mnist": images.mlp()}
"""Of the tasks that tell images apart."""

ENWIK8 = Task(
    "enwik8",
    functools.partial(language_modelling, texts.transformer, metric="bits per character", steps=120, judged=1 << 16),
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

TASKS = tasks.TASKS | {
    "fashion-mnist": Task(
        "fashion-mnist",
        functools.partial(classification, NETWORKS["fashion-mnist"]),
        Settings(epochs=6, batch_per_worker=16, learning_rate=0.02, density=0.001, clip_norm=8.0, warm_up_epochs=0.5),
        "MLP 784-512-256-10 on Fashion-MNIST",
    ),
    "mnist": Task(
        "mnist",
        functools.partial(classification, images.lenet()),
        Settings(epochs=2, batch_per_worker=8, learning_rate=0.02, density=0.001, clip_norm=16.0, warm_up_epochs=0.25),
        "LeNet of 431 thousand parameters on MNIST",
    ),
    "cifar10": Task(
        "cifar10",
        functools.partial(classification, images.resnet()),
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
        functools.partial(classification, images.cifar_net(32)),
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
        functools.partial(language_modelling, texts.lstm, metric="perplexity", steps=1328, judged=1 << 20),
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
"""Those of the package among them."""


def task(name: str) -> Task:
    """Returns the task of a name.

    Raises:
      UnknownNameError: if there is no such task.
    """
    return look_up("task", name, TASKS)
