"""Settings: what cannot be run is refused, with what to do instead."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp_jax._errors import SettingError
from gradcomp_jax.experiments.settings import CountedSettings, split_batch
from gradcomp_jax.experiments.tasks import TASKS

SETTINGS = TASKS["digits"].settings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("workers", 0),
        ("epochs", 0),
        ("batch_per_worker", -1),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("learning_rate", float("inf")),
        ("epochs", 10**23),
        ("delay", 10**8),
        ("every", 2**31),
        ("density", float("nan")),
        ("density", 0.0),
        ("density", 1.5),
        ("clip_norm", 0.0),
        ("warm_up_epochs", -1.0),
    ],
)
def test_a_value_out_of_range_is_named(field, value):
    with pytest.raises(SettingError, match=f"{field} must .* got {value}"):
        dataclasses.replace(SETTINGS, **{field: value})


@pytest.mark.parametrize("field", ["optimizer", "schedule"])
def test_an_unknown_name_is_refused_with_those_there_are(field):
    known = "sgd, adamw" if field == "optimizer" else "constant, linear, cosine"
    with pytest.raises(SettingError, match=f"{field} must be one of {known}, got 'lion'"):
        dataclasses.replace(SETTINGS, **{field: "lion"})


@pytest.mark.standard_promotion  # optax's schedules count in int32
def test_a_cosine_rises_for_a_twentieth_of_the_run_and_falls_to_zero():
    settings = CountedSettings(**dataclasses.asdict(dataclasses.replace(SETTINGS, schedule="cosine")), steps=100)
    rates = np.asarray(jax.jit(jax.vmap(settings.rate()))(jnp.arange(101))) / settings.learning_rate
    np.testing.assert_allclose(rates[:6], np.arange(6) / 5, atol=1e-6)
    np.testing.assert_allclose(rates[5:], (1 + np.cos(np.pi * np.arange(96) / 95)) / 2, atol=1e-6)


def test_steps_per_epoch_counts_whole_batches():
    settings = dataclasses.replace(SETTINGS, workers=4, batch_per_worker=8)
    assert settings.steps_per_epoch(32) == 1
    assert settings.steps_per_epoch(100) == 3
    with pytest.raises(SettingError, match="use a smaller batch"):
        settings.steps_per_epoch(31)


def test_split_batch():
    assert split_batch(64, 8) == 8
    assert split_batch(7, 7) == 1
    with pytest.raises(SettingError, match="use 63 or 70"):
        split_batch(64, 7)
    with pytest.raises(SettingError, match="use 8 or 16"):
        split_batch(4, 8)
    with pytest.raises(SettingError, match="workers must be at least 1"):
        split_batch(64, 0)
