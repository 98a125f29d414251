"""A process is killed, frozen or cut off: the others end within the bound that docs/clusters.md states, and nothing is lost."""

import dataclasses
import functools
import pathlib
import signal
import sys
import time

import numpy as np
import pytest

from benchmarks import lab
from gradcomp_jax.experiments import Trainer, load, task, train_with_checkpoints
from tests.network.processes import (
    PATIENCE_S,
    environment,
    free_port,
    record,
    started,
    steps_shown,
    training,
    wait,
    wait_for_epoch,
)

pytest.importorskip("typer")
pytestmark = pytest.mark.xdist_group("processes")

# A process that has detected the loss still has to end; the machine of the tests may be busy.
MARGIN_S = 10
NEEDS = lab.available()
BATCH = 120


@functools.cache
def trainer(method: str, *, workers: int, epochs: int) -> Trainer:
    whole = task("digits")
    settings = dataclasses.replace(whole.settings, workers=workers, batch_per_worker=BATCH // workers, epochs=epochs)
    return Trainer(method, whole.on(load("digits")), settings)


def words(folder: pathlib.Path, *, epochs: int, heartbeat: int, method: str = "topk-sgd") -> tuple[str, ...]:
    return (
        *("--method", method, "--batch", str(BATCH), "--epochs", str(epochs)),
        *("--checkpoint", str(folder), "--heartbeat-timeout", str(heartbeat)),
    )


def lost(
    folder: pathlib.Path, count: int, victim: int, number: int, heartbeat: int, method: str = "topk-sgd"
) -> tuple[dict, float]:
    """Sends a signal to one process in mid-training; returns the record they leave, and how long the others took to end."""
    many = 10_000  # More epochs than there is time for: the run ends by the signal or not at all.
    with training(folder, count, *words(folder / "saved", epochs=many, heartbeat=heartbeat, method=method)) as running:
        wait_for_epoch(folder / "saved", 2, running, within_s=PATIENCE_S)
        running[victim].child.send_signal(number)
        start = time.monotonic()
        others = [process for process in running if process.index != victim]
        codes = wait(others, within_s=heartbeat + MARGIN_S)
        seconds = time.monotonic() - start
        assert all(codes), codes
        for process in others:
            (sentence,) = process.sentences()
            assert sentence.startswith(f"gradcomp: process {process.index} of {count} ")
            assert sentence.endswith(
                f"start all processes again with --checkpoint {folder / 'saved'}, to go on from the last epoch saved"
            )
        return record(folder / "saved"), seconds


# Process 0 is the coordinator of all the others.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "number"), [(1, signal.SIGKILL), pytest.param(0, signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_killed_worker_ends_all_and_a_restart_loses_nothing(victim: int, number: int, tmp_path: pathlib.Path) -> None:
    before, _ = lost(tmp_path, 2, victim, number, heartbeat=20)
    epochs = before["epoch"] + 2
    with training(tmp_path, 2, *words(tmp_path / "saved", epochs=epochs, heartbeat=20)) as running:
        assert wait(running, within_s=PATIENCE_S) == [0, 0], running[0].stderr + running[1].stderr
    after = record(tmp_path / "saved")
    assert after["loss"][: len(before["loss"])] == before["loss"]
    # It went on from the last epoch saved, and not from the start.
    assert steps_shown(running[0]) == 2 * (1438 // BATCH)
    # Parameters, residuals, order of the examples: the run that nobody killed, bit for bit.
    whole = trainer("topk-sgd", workers=2, epochs=epochs).run(0)
    assert after["loss"] == list(whole.loss)
    assert after["evaluation"] == list(whole.evaluation)


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [(3, 2)])
def test_a_restart_with_another_number_of_workers(old: int, new: int, tmp_path: pathlib.Path) -> None:
    # With 8 bits a value the curve hardly depends on the number of workers, and can be compared.
    method = "block-quantized"
    before, _ = lost(tmp_path, old, 0, signal.SIGKILL, heartbeat=20, method=method)
    epochs = before["epoch"] + 3
    with training(tmp_path, new, *words(tmp_path / "saved", epochs=epochs, heartbeat=20, method=method)) as running:
        assert wait(running, within_s=PATIENCE_S) == [0] * new, "".join(process.stderr for process in running)
    after = record(tmp_path / "saved")
    assert after["loss"][: len(before["loss"])] == before["loss"]
    whole = trainer(method, workers=old, epochs=epochs).run(0)
    # Single steps, whose losses end near .1, part by up to 5%: how rounding falls depends on the processor, too.
    curves = [np.reshape(loss, (epochs, -1)).mean(1) for loss in (after["loss"], whole.loss)]
    np.testing.assert_allclose(*curves, rtol=0.05)


@pytest.mark.slow
def test_a_frozen_process_ends_the_others_within_the_heartbeat_timeout(tmp_path: pathlib.Path) -> None:
    """A machine that hangs or vanishes closes no connection: nobody is told."""
    _, seconds = lost(tmp_path, 3, 1, signal.SIGSTOP, heartbeat=8)
    assert seconds < 8 + MARGIN_S


@pytest.mark.slow
def test_a_damaged_checkpoint_is_one_sentence_from_every_process(tmp_path: pathlib.Path) -> None:
    train_with_checkpoints(trainer("topk-sgd", workers=2, epochs=2), 0, tmp_path / "saved")
    files = [path for path in (tmp_path / "saved" / "epoch-2").rglob("*") if path.is_file()]
    max(files, key=lambda path: path.stat().st_size).unlink()
    with training(tmp_path, 2, *words(tmp_path / "saved", epochs=3, heartbeat=20)) as running:
        assert wait(running, within_s=PATIENCE_S) == [2, 2], running[0].stderr + running[1].stderr
    for process in running:
        (sentence,) = process.sentences()
        assert f"process {process.index}: the checkpoint at {tmp_path}/saved/epoch-2 is damaged" in sentence
        assert sentence.endswith("delete it to go on from epoch 1")


ENDED = """
import os, sys
import gradcomp_jax as gc
from gradcomp_jax.cli import main
from gradcomp_jax.distributed import exit_notice
from gradcomp_jax.experiments import resume
def unsaved(*args, **options):
    raise {error}("the other process is gone")
def dismissed(self):
    self._send(".")
    if begun:
        os.abort()
    begun.append(self)
begun = []
resume.save_checkpoint, exit_notice.ExitNotice.dismiss = unsaved, dismissed
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("ValueError", -signal.SIGABRT, "process {}: cannot save epoch 1"),
        ("gc.distributed.ClusterError", 1, "process {} of 2 lost another process"),
    ],
    ids=["of a save", "of a process that is lost"],
)
def test_a_process_that_ends_while_an_error_is_on_its_way_says_it(
    tmp_path: pathlib.Path, error: str, code: int, said: str
) -> None:
    """JAX ends a process that lost the others from within, between the error of a save and its sentence."""
    line = ("train", "--distributed", "--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--process-id")
    rest = ("--out", str(tmp_path / "out"), *words(tmp_path / "saved", epochs=2, heartbeat=20))
    program = ENDED.replace("{error}", error)
    commands = [[sys.executable, "-c", program, *line, str(index), *rest] for index in range(2)]
    with started(tmp_path, commands, [environment()] * 2) as running:
        assert wait(running, within_s=PATIENCE_S) == [code] * 2, running[0].stderr + running[1].stderr
    for process in running:
        (sentence,) = process.sentences()
        assert said.format(process.index) in sentence


STUCK = """
import sys, time, jax
import gradcomp_jax as gc
with gc.distributed.Watchdog(step_timeout=1, remedy="start again") as watchdog:
    watchdog.beat()
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_step_that_never_ends_ends_the_process(tmp_path: pathlib.Path) -> None:
    """A peer that is alive and does not answer: a deadlock of its own, or a link cut between two workers only."""
    start = time.monotonic()
    with started(tmp_path, [[sys.executable, "-c", STUCK]], [environment()]) as running:
        assert wait(running, within_s=30) == [1]
    assert time.monotonic() - start < 30
    (sentence,) = running[0].sentences()
    assert "process 0 of 1 waited 1 s for a step" in sentence and sentence.endswith("start again")


ALONE = """
import sys
from gradcomp_jax.cli import main
from gradcomp_jax.distributed import cluster
cluster._START_TIMEOUT_S = 2
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("index", [1])
def test_a_process_that_never_comes_is_not_waited_for_for_ever(index: int, tmp_path: pathlib.Path) -> None:
    line = ("train", "--distributed", "--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2")
    command = [sys.executable, "-c", ALONE, *line, "--process-id", str(index)]
    start = time.monotonic()
    with started(tmp_path, [command], [environment()]) as running:
        assert all(wait(running, within_s=60))
    # Beside the 2 s, Python and JAX take some to start.
    assert time.monotonic() - start < 2 * 2 + MARGIN_S
    (sentence,) = running[0].sentences()
    assert "the processes did not come together at 127.0.0.1:" in sentence


def cut_off(tmp_path: pathlib.Path, *, heartbeat: int, epochs: int, seconds: float | None, after: float = 1.0):
    """Three workers on slow links; one is cut off some time after an epoch was saved, for some time or for good.

    After a second it is in the midst of the next epoch's steps, and for some tenths of one the barriers of the save are on
    their way.
    """
    with lab.Network(workers=3, rate=20e6) as net:

        def popen(index: int):
            return lambda argv, **options: net.popen(index, argv, **options)

        line = words(tmp_path / "saved", epochs=epochs, heartbeat=heartbeat, method="dense")
        # Small batches: the epoch has seconds of steps, and its save is short beside them.
        line = (*line, "--batch", "24")
        with training(tmp_path, 3, *line, coordinator=net.coordinator, popen=popen) as running:
            wait_for_epoch(tmp_path / "saved", 1, running, within_s=PATIENCE_S)
            time.sleep(after)
            net.cut(1)
            start = time.monotonic()
            if seconds is None:
                codes = wait(running, within_s=heartbeat + MARGIN_S)
                return running, codes, time.monotonic() - start
            time.sleep(seconds)
            assert [process.child.poll() for process in running] == [None] * 3
            net.restore(1)
            return running, wait(running, within_s=PATIENCE_S), time.monotonic() - start


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.skipif(NEEDS is not None, reason=str(NEEDS))
@pytest.mark.parametrize("after", [1.0, 0.2])
def test_training_goes_on_after_a_cut_of_20_seconds(after: float, tmp_path: pathlib.Path) -> None:
    running, codes, _ = cut_off(tmp_path, heartbeat=100, epochs=3, seconds=20, after=after)
    assert codes == [0, 0, 0], "".join(process.stderr for process in running)
    assert len(record(tmp_path / "saved")["loss"]) == 3 * (1438 // 24)
    # Nobody ended and came back: the steps are those of one run from the start.
    assert steps_shown(running[0]) == 3 * (1438 // 24)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.skipif(NEEDS is not None, reason=str(NEEDS))
def test_a_worker_that_is_cut_off_for_good_ends_all(tmp_path: pathlib.Path) -> None:
    """Both sides of the cut end by themselves."""
    running, codes, seconds = cut_off(tmp_path, heartbeat=10, epochs=100, seconds=None)
    assert all(codes)
    assert seconds < 10 + MARGIN_S
    assert [len(process.sentences()) for process in running] == [1, 1, 1]
