"""A task small enough for a test."""

import dataclasses

import pytest

from gradcomp_jax.experiments import load, task


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
