"""Runs whose replicas differ: they learn, count their bytes over a period, and go on where they stopped."""

import dataclasses

import numpy as np
import pytest

from gradcomp_jax._errors import SettingError
from gradcomp_jax.experiments import Listener, Trainer, train_with_checkpoints
from gradcomp_jax.experiments.replicas import REPLICA_RECIPES

pytestmark = pytest.mark.xdist_group("experiments")


def marks_of(method: str) -> list[pytest.MarkDecorator]:
    """Quick is one of them; optax's Muon multiplies floats and integers."""
    slow = [] if method == "delayed-dgc" else [pytest.mark.slow]
    return [*slow, pytest.mark.standard_promotion] if method == "muloco" else slow


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param(m, marks=marks_of(m)) for m in REPLICA_RECIPES])
def test_training_learns(train, method: str) -> None:
    result = train(method, workers=2, batch_per_worker=32, epochs=8, density=0.1, delay=2, every=2)
    # Ten classes: chance is a tenth.
    assert result.final_evaluation > 0.7
    assert np.mean(result.loss[-5:]) < 0.5 * np.mean(result.loss[:5])


@pytest.fixture(scope="module")
def trainers(digits, digits_task):
    """By period, a dense delayed average."""
    return {
        every: Trainer(
            "delayed-average", digits_task.on(digits), dataclasses.replace(digits_task.settings, every=every, delay=3)
        )
        for every in (1, 4)
    }


@pytest.mark.slow
def test_bytes_are_those_of_a_period(trainers) -> None:
    """One exchange in four steps, and the mean loss in every one."""
    one, four = trainers[1].wire, trainers[4].wire
    assert one.sent == one.sent_mean == one.sent_most
    assert four.sent_most == one.sent_most
    assert four.sent_mean == pytest.approx(four.sent_most / 4, rel=1e-3)
    assert four.sent == round(four.sent_mean)


@pytest.mark.slow
def test_a_broken_off_run_goes_on(trainers, tmp_path) -> None:
    """Bit for bit, with what was in flight."""
    whole = trainers[4].run(1)

    class Stop(Exception):
        pass

    class Breaker(Listener):
        def finished_epoch(self, method, seed, epoch, past) -> None:
            raise Stop

    with pytest.raises(Stop):
        train_with_checkpoints(trainers[4], 1, tmp_path, listener=Breaker())
    result = train_with_checkpoints(trainers[4], 1, tmp_path)
    assert result.loss == whole.loss
    assert result.evaluation == whole.evaluation


def test_periods_and_delays_are_checked(digits_task) -> None:
    with pytest.raises(SettingError, match="every must be a whole number from 1 to 1,000,000, got 0"):
        dataclasses.replace(digits_task.settings, every=0)
    with pytest.raises(SettingError, match="delay must be a whole number from 0 to 1,024, got -1"):
        dataclasses.replace(digits_task.settings, delay=-1)
