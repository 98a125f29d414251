"""``--log-dir``: the events are read back from the files, and say what the run did."""

import dataclasses
import errno
import json
import math
import os
import struct

import numpy as np
import pytest

pytest.importorskip("typer")

from gradcomp_jax.cli import event_files
from gradcomp_jax.cli.event_files import EventFiles
from gradcomp_jax.experiments import SettingError, own_problem, train_with_checkpoints
from gradcomp_jax.experiments.run import Trainer

TAGS = {"train/loss", "train/epoch_loss", "wire/bytes_per_step", "exchange/steps", "exchange/skipped"}


def events(folder):
    """(tag, step) -> values of all files of a folder, oldest file first; and the step of each file's session start."""
    from tensorboardX.proto.event_pb2 import Event

    found, starts = {}, []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            # TFRecord: length, its checksum, the event, its checksum.
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            if event.HasField("session_log"):
                starts.append(event.step)
            for value in event.summary.value:
                found.setdefault((value.tag, event.step), []).append(value.simple_value)
    return found, starts


def make():
    x = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    batches = [(x[i : i + 16], x[i : i + 16, :8]) for i in range(0, 64, 16)]
    return lambda p, b: ((b[0] @ p["w"] - b[1]) ** 2).mean(), {"w": np.zeros((32, 8), np.float32)}, batches


def trainer(method: str, epochs: int, listener: EventFiles | None = None) -> Trainer:
    problem = own_problem("here:make", make)
    settings = dataclasses.replace(problem.settings, workers=2, batch_per_worker=8, epochs=epochs)
    return Trainer(method, problem, settings, listener=listener)


def test_losses_metric_diagnostics_and_bytes_are_there(tmp_path) -> None:
    pytest.importorskip("tensorboardX")
    with EventFiles(tmp_path / "logs") as log:
        one = trainer("dgc", 2, log)
        first = train_with_checkpoints(one, 0, tmp_path / "saved", listener=log)
        # What is complete leaves no file; what goes on hides what an older file has from there on.
        train_with_checkpoints(one, 0, tmp_path / "saved", listener=log)
        (folder,) = (tmp_path / "logs").iterdir()
        assert folder.name == "dgc-seed-0" and len(list(folder.iterdir())) == 1
        found, starts = events(folder)
        assert starts == []
        longer = trainer("dgc", 3, log)
        whole = train_with_checkpoints(longer, 0, tmp_path / "saved", listener=log)
    assert len(list(folder.iterdir())) == 2
    later, starts = events(folder)
    assert starts == [9]
    assert {tag for tag, _ in found} >= TAGS
    assert [found["train/loss", step][0] for step in range(1, 9)] == pytest.approx(first.loss)
    assert [later["train/loss", step][0] for step in range(1, 13)] == pytest.approx(whole.loss)
    assert [later["train/epoch_loss", step][0] for step in (4, 8, 12)] == pytest.approx(whole.evaluation)
    assert [later["exchange/steps", step][0] for step in (4, 8, 12)] == [4, 8, 12]
    assert math.isfinite(later["exchange/memory_ratio", 12][0])
    # The first epoch is DGC's warm-up, whose steps send more.
    assert later["wire/bytes_per_step", 4] == [one.wire.stages[-1][1]]
    assert later["wire/bytes_per_step", 12] == [longer.wire.sent] < later["wire/bytes_per_step", 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["dense", "sign-sgd", "one-bit-adam", "delayed-dgc", "diloco", "gossip", "accumulate"]
)
def test_every_kind_of_method_has_something_to_say(method, tmp_path) -> None:
    pytest.importorskip("tensorboardX")
    with EventFiles(tmp_path) as log:
        trainer(method, 1, log).run(0, listener=log)
    found, _ = events(tmp_path / f"{method}-seed-0")
    assert {"train/loss", "wire/bytes_per_step"} < {tag for tag, _ in found}


def test_without_the_library_the_command_says_what_to_install(gradcomp, monkeypatch) -> None:
    monkeypatch.setattr(event_files.importlib.util, "find_spec", lambda name: None)
    result = gradcomp("train", "--method", "dense", "--log-dir", "logs")
    assert result.exit_code == 2
    assert result.stderr == "gradcomp: --log-dir needs tensorboardX: pip install -e '.[tensorboard]' in a checkout\n"


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path) -> None:
    pytest.importorskip("tensorboardX")
    (tmp_path / "file").write_text(json.dumps("not a folder"))
    with pytest.raises(SettingError, match="cannot write to"):
        EventFiles(tmp_path / "file")


def test_a_full_disk_is_a_line_and_the_run_goes_on(tmp_path, monkeypatch, capsys) -> None:
    """With the library's own thread it would wait for ever."""
    record_writer = pytest.importorskip("tensorboardX.record_writer")

    def full(*event) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with EventFiles(tmp_path) as log:
        log.started("dgc", 0, 100, 0)
        log.stepped("dgc", 0, 1, 0.5)
        monkeypatch.setattr(record_writer.RecordWriter, "write", full)
        for step in range(2, 100):
            log.stepped("dgc", 0, step, 0.5)
        log.started("dgc", 1, 100, 0)
    sentence = f"gradcomp: cannot write event files in {tmp_path}: No space left on device; the run goes on without\n"
    assert capsys.readouterr().err == sentence
