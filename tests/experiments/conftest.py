"""A task small enough for a test, and a run that compiles nothing."""

import dataclasses
import shutil

import pytest

from gradcomp_jax.experiments import Listener, Trainer, load, task
from tests.experiments.descent import Descent, stopped


@pytest.fixture(scope="session")
def digits():
    """The digits with 128 training images."""
    data = load("digits")
    return dataclasses.replace(data, train_x=data.train_x[:128], train_y=data.train_y[:128])


@pytest.fixture(scope="session")
def digits_task():
    """Two workers, two epochs."""
    whole = task("digits")
    settings = dataclasses.replace(
        whole.settings, workers=2, epochs=2, batch_per_worker=8, warm_up_epochs=1, density=0.05
    )
    return dataclasses.replace(whole, settings=settings)


@pytest.fixture(scope="session")
def train():
    """Trains a method on the digits."""

    def trained(method, **overrides):
        settings = dataclasses.replace(task("digits").settings, **overrides)
        return Trainer(method, task("digits").on(load("digits")), settings).run(0)

    return trained


@pytest.fixture(scope="session")
def descent():
    return Descent()


@pytest.fixture(scope="session")
def whole(descent):
    return descent.run(0, listener=Listener())


@pytest.fixture(scope="session")
def two_epochs(descent, tmp_path_factory):
    """A folder with a run that was stopped after two epochs, to be copied."""
    folder = tmp_path_factory.mktemp("runs") / "two"
    stopped(descent, folder, 2)
    return folder


@pytest.fixture
def run(two_epochs, tmp_path):
    shutil.copytree(two_epochs, tmp_path / "run")
    return tmp_path / "run"
