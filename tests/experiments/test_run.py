"""A run: it learns, it repeats itself, it counts its bytes, and it goes on where it stopped."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from gradcomp_jax.experiments import (
    Listener,
    SettingError,
    Trainer,
    resume,
    train_with_checkpoints,
)

# One process for all of them: a step is compiled once.
pytestmark = pytest.mark.xdist_group("experiments")


@pytest.fixture(scope="module")
def dgc(digits_task, digits):
    return Trainer("dgc", digits_task.on(digits), digits_task.settings)


@pytest.fixture(scope="module")
def dense(digits_task, digits):
    return Trainer("dense", digits_task.on(digits), digits_task.settings)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", "terngrad", "dgc"])
def test_training_learns(train, method):
    result = train(method, workers=2, batch_per_worker=32, epochs=6, density=0.1)
    # Ten classes: chance is a tenth.
    assert result.final_evaluation > 0.7
    assert np.mean(result.loss[-5:]) < 0.5 * np.mean(result.loss[:5])


def test_result_has_one_loss_a_step_and_one_evaluation_an_epoch(dense):
    result = dense.run(0)
    assert len(result.loss) == 2 * dense.steps_per_epoch == 16
    assert len(result.evaluation) == 2
    assert result.final_evaluation == result.evaluation[-1]
    assert 0 < result.step_time.lower_quartile <= result.step_time.median
    assert result.step_time.median <= result.step_time.upper_quartile


@pytest.mark.slow
def test_same_seed_same_bits_and_another_seed_others(dgc):
    first, again, other = dgc.run(3), dgc.run(3), dgc.run(4)
    assert first.loss == again.loss
    assert first.evaluation == again.evaluation
    assert first.loss != other.loss


def test_all_workers_together_see_the_same_batch_however_many_they_are(digits_task, digits):
    losses = []
    for workers in (1, 4):
        settings = dataclasses.replace(digits_task.settings, workers=workers, batch_per_worker=16 // workers)
        losses.append(Trainer("dense", digits_task.on(digits), settings).run(0).loss)
    # The same sums in another order.
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-3)


def test_dense_bytes_are_those_of_an_all_reduce(dense):
    params = jax.tree.leaves(dense.initial_state(0).params)
    size = sum(leaf.size for leaf in params)
    workers = dense.settings.workers
    # Beside the gradient only the loss and a flag or two cross.
    expected = 2 * (workers - 1) / workers * 4 * size
    assert expected <= dense.wire.sent <= expected + 64


@pytest.mark.slow
def test_bytes_of_the_warm_up_are_counted(dgc):
    assert dgc.wire.sent < dgc.wire.sent_mean < dgc.wire.sent_most


def test_a_run_hears_of_itself(dense):
    class Counter(Listener):
        def __init__(self):
            self.steps = []
            self.epochs = []
            self.lengths = []
            self.results = []

        def started(self, method, seed, steps, done):
            self.lengths.append(steps)

        def stepped(self, method, seed, step, loss):
            self.steps.append(step)

        def finished_epoch(self, method, seed, epoch, past):
            self.epochs.append((epoch, len(past.loss)))

        def finished(self, result):
            self.results.append(result)

    counter = Counter()
    result = dense.run(0, listener=counter)
    assert counter.results == [result]
    assert counter.lengths == [16]
    assert counter.steps == list(range(1, 17))
    assert counter.epochs == [(1, 8), (2, 16)]


class Stop(Exception):
    """Breaks a run off."""


class StopAfter(Listener):
    """Breaks a run off after an epoch."""

    def __init__(self, epoch):
        self.epoch = epoch

    def finished_epoch(self, method, seed, epoch, past):
        if epoch == self.epoch:
            raise Stop


@pytest.mark.slow
def test_a_resumed_run_is_the_run_that_was_never_broken_off(dgc, tmp_path):
    whole = dgc.run(5)
    with pytest.raises(Stop):
        train_with_checkpoints(dgc, 5, tmp_path, listener=StopAfter(1))
    resumed = train_with_checkpoints(dgc, 5, tmp_path)
    assert resumed.loss == whole.loss
    assert resumed.evaluation == whole.evaluation
    # The last two epochs are kept, and nothing else.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-1", "epoch-2", "run.json", "run.lock"]


@pytest.mark.slow
def test_workers_that_share_a_device_go_on_with_the_run_of_workers_that_do_not(digits_task, digits, dgc, tmp_path):
    shared = Trainer("dgc", digits_task.on(digits), digits_task.settings, one_device=True)
    assert shared.wire == dgc.wire
    whole = dgc.run(5)
    np.testing.assert_allclose(shared.run(5).loss, whole.loss, rtol=1e-3)
    with pytest.raises(Stop):
        train_with_checkpoints(dgc, 5, tmp_path, listener=StopAfter(1))
    resumed = train_with_checkpoints(shared, 5, tmp_path)
    assert resumed.loss[:8] == whole.loss[:8]
    np.testing.assert_allclose(resumed.loss, whole.loss, rtol=1e-3)


def test_workers_that_share_a_device_have_no_copies_to_compare(digits_task, digits):
    with pytest.raises(SettingError, match="have no copies to compare: drop --verify-every"):
        Trainer("dgc", digits_task.on(digits), digits_task.settings, one_device=True, verify_every=2)


class NeverTrains(Listener):
    """Hears of a run that is only read."""

    def __init__(self):
        self.heard = []

    def started(self, method, seed, steps, done):
        self.heard.append((steps, done))

    def stepped(self, method, seed, step, loss):
        raise AssertionError("a step of a run that was complete")


def test_a_complete_run_says_again_what_it_gave(digits_task, digits, dense, tmp_path):
    first = train_with_checkpoints(dense, 5, tmp_path)
    listener = NeverTrains()
    again = train_with_checkpoints(dense, 5, tmp_path, listener=listener)
    assert again == first
    assert listener.heard == [(16, 16)]
    fewer = dataclasses.replace(dense.settings, epochs=1)
    with pytest.raises(SettingError, match=r"has had its 2 epochs, with 2 workers: ask for as many epochs"):
        train_with_checkpoints(Trainer("dense", digits_task.on(digits), fewer), 5, tmp_path)
    wider = dataclasses.replace(dense.settings, workers=4, batch_per_worker=4)
    with pytest.raises(SettingError, match=r"has had its 2 epochs, with 2 workers: ask for as many workers"):
        train_with_checkpoints(Trainer("dense", digits_task.on(digits), wider), 5, tmp_path)


def damage(folder):
    """Changes one bit of the largest file, which holds values."""
    path = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    held = bytearray(path.read_bytes())
    held[len(held) // 2] ^= 1
    path.write_bytes(held)


@pytest.mark.slow
def test_a_damaged_state_is_refused_and_the_one_before_it_goes_on(dgc, digits_task, digits, tmp_path):
    whole = train_with_checkpoints(dgc, 6, tmp_path)
    damage(tmp_path / "epoch-2")
    longer = Trainer("dgc", digits_task.on(digits), dataclasses.replace(dgc.settings, epochs=3))
    with pytest.raises(SettingError, match=r"epoch-2 is damaged \(.*: delete it to go on from epoch 1"):
        train_with_checkpoints(longer, 6, tmp_path)
    shutil.rmtree(tmp_path / "epoch-2")
    again = train_with_checkpoints(dgc, 6, tmp_path)
    assert again.loss == whole.loss
    assert again.evaluation == whole.evaluation


@pytest.mark.slow
def test_without_an_earlier_state_the_remedy_is_another_folder(dgc, tmp_path):
    with pytest.raises(Stop):
        train_with_checkpoints(dgc, 6, tmp_path, listener=StopAfter(1))
    damage(tmp_path / "epoch-1")
    with pytest.raises(SettingError, match=r"epoch-1 is damaged .*: start anew in another folder"):
        train_with_checkpoints(dgc, 6, tmp_path)
    shutil.rmtree(tmp_path / "epoch-1")
    with pytest.raises(SettingError, match="no state of it or an earlier one is there: use another folder"):
        train_with_checkpoints(dgc, 6, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["in the midst of the state", "between state and record"])
def test_a_run_that_is_stopped_while_it_saves_goes_on_from_the_state_before(dgc, tmp_path, monkeypatch, moment):
    whole = dgc.run(7)
    save = resume.save_checkpoint

    def stopped(directory, state, *, overwrite):
        if directory.name == "epoch-2":
            if moment == "between state and record":
                save(directory, state, overwrite=overwrite)
            else:
                # As Orbax names what is not complete.
                half = directory.with_name("epoch-2.orbax-checkpoint-tmp")
                half.mkdir()
                (half / "manifest.ocdbt").write_bytes(b"half")
            raise Stop
        save(directory, state, overwrite=overwrite)

    monkeypatch.setattr(resume, "save_checkpoint", stopped)
    with pytest.raises(Stop):
        train_with_checkpoints(dgc, 7, tmp_path)
    monkeypatch.undo()
    again = train_with_checkpoints(dgc, 7, tmp_path)
    assert again.loss == whole.loss
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-1", "epoch-2", "run.json", "run.lock"]


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_workers(digits_task, digits, dgc, tmp_path):
    with pytest.raises(Stop):
        train_with_checkpoints(dgc, 0, tmp_path, listener=StopAfter(1))
    settings = dataclasses.replace(dgc.settings, workers=4, batch_per_worker=4)
    result = train_with_checkpoints(Trainer("dgc", digits_task.on(digits), settings), 0, tmp_path)
    assert result.loss[:8] == dgc.run(0).loss[:8]
    assert len(result.loss) == 16
    assert np.isfinite(result.loss).all()


def test_a_negative_seed_is_refused(dense):
    with pytest.raises(SettingError, match="seed must be at least 0, got -1"):
        dense.run(-1)


def test_another_run_s_checkpoint_is_refused(dgc, dense, tmp_path):
    with pytest.raises(Stop):
        train_with_checkpoints(dense, 0, tmp_path, listener=StopAfter(1))
    with pytest.raises(SettingError, match="a run with method dense, not dgc"):
        train_with_checkpoints(dgc, 0, tmp_path)
    with pytest.raises(SettingError, match="a run with seed 0, not 1"):
        train_with_checkpoints(dense, 1, tmp_path)


def test_a_folder_with_something_else_is_refused(dense, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(SettingError, match="not the record of a run"):
        train_with_checkpoints(dense, 0, tmp_path)


def test_more_workers_than_devices_is_refused(digits_task, digits):
    settings = dataclasses.replace(digits_task.settings, workers=128, batch_per_worker=1)
    with pytest.raises(SettingError, match="128 workers need 128 devices"):
        Trainer("dense", digits_task.on(digits), settings)
