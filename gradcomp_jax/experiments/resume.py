"""A run that is saved after every epoch, and goes on from what is saved."""

import dataclasses
import json
import os
import pathlib
import secrets
import shutil
import time
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gradcomp_jax._errors import SettingError
from gradcomp_jax.experiments.run import Listener, Past, RunResult, Trainer
from gradcomp_jax.training import restore_checkpoint, save_checkpoint
from gradcomp_jax.training.checkpoint import DamagedCheckpointError

_RECORD = "run.json"
_KEPT = 2
"""Epochs whose states stay in the folder: should the newest be damaged, there is one to go back to."""

# A network file system may show a new file on other machines only after a while.
_PATIENCE_S = 5.0


def train_with_checkpoints(
    trainer: Trainer, seed: int, folder: pathlib.Path, *, listener: Listener | None = None
) -> RunResult:
    """Trains, saves after every epoch, and starts from the last epoch saved if there is one.

    The result is that of a run which was never broken off, bit for bit. Where the number of workers has changed and the
    batch has not, the run goes on with its per-device state handed to the new workers. The states of the last two epochs
    are kept; delete the newest (``epoch-N``) and the run goes on from the one before. With several processes all of them
    call this, with a folder that all of them see; how many there were before does not matter.

    Raises:
      SettingError: if ``folder`` holds another run, or one that has had all its epochs, or a state that is damaged, or
        if a process does not see it.
    """
    what = _describe(trainer, seed)
    saver = _Saver(what, folder, listener or Listener())
    _check_shared(folder)
    return trainer.run(seed, listener=saver, past=_restore(trainer, seed, what, folder))


class _Saver(Listener):
    """Passes everything on, and saves first."""

    def __init__(self, what: dict[str, Any], folder: pathlib.Path, listener: Listener) -> None:
        self._what = what
        self._folder = folder.absolute()
        self._listener = listener
        for event in ("started", "stepped", "finished"):
            setattr(self, event, getattr(listener, event))

    def finished_epoch(self, method: str, seed: int, epoch: int, past: Past) -> None:
        # A state of this name was left behind by a run that was stopped between the two calls below.
        save_checkpoint(self._folder / f"epoch-{epoch}", past.state, overwrite=True)
        if jax.process_index() == 0:
            self._record(epoch, past)
        self._listener.finished_epoch(method, seed, epoch, past)

    def _record(self, epoch: int, past: Past) -> None:
        record = {**self._what, "epoch": epoch, "loss": past.loss, "accuracy": past.accuracy}
        # The record names the state, which all processes have written, and is replaced in one go: a run that is
        # stopped here, at any moment, leaves a record whose state is complete.
        draft = self._folder / f"{_RECORD}.draft"
        draft.write_text(json.dumps(record))
        os.replace(draft, self._folder / _RECORD)
        kept = {f"epoch-{number}" for number in range(epoch - _KEPT + 1, epoch + 1)}
        for old in self._folder.glob("epoch-*"):
            if old.name not in kept:
                shutil.rmtree(old)


def _restore(trainer: Trainer, seed: int, what: dict[str, Any], folder: pathlib.Path) -> Past | None:
    path = folder.absolute() / _RECORD
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text())
        last, loss, accuracy = record["epoch"], record["loss"], record["accuracy"]
    except (ValueError, KeyError, TypeError) as error:
        raise SettingError(f"{path} is not the record of a run: use another folder") from error
    for name, value in what.items():
        if record.get(name) != value:
            raise SettingError(
                f"{folder} holds a run with {name} {record.get(name)}, not {value}: "
                "use the same value or another folder"
            )
    saved = [epoch for epoch in range(last, 0, -1) if (path.parent / f"epoch-{epoch}").is_dir()]
    if not saved:
        raise SettingError(
            f"{path} says epoch {last}, and no state of it or an earlier one is there: use another folder"
        )
    epoch, *earlier = saved
    try:
        state = restore_checkpoint(path.parent / f"epoch-{epoch}", trainer.initial_state(seed))
    except DamagedCheckpointError as error:
        whole = str(error).rpartition(": ")[0]
        remedy = f"delete it to go on from epoch {earlier[0]}" if earlier else "start anew in another folder"
        raise SettingError(f"{whole}: {remedy}") from error
    except (ValueError, FileNotFoundError) as error:
        raise SettingError(f"{folder} cannot be gone on with: {error}") from error
    return Past(state, tuple(loss[: epoch * trainer.steps_per_epoch]), tuple(accuracy[:epoch]))


def _describe(trainer: Trainer, seed: int) -> dict[str, Any]:
    """What two runs must have in common for one to go on with the other."""
    settings = dataclasses.asdict(trainer.settings)
    # More epochs are what a run goes on for, and workers may share the same batch anew.
    for name in ("epochs", "workers", "batch_per_worker"):
        del settings[name]
    return {
        "method": trainer.method,
        "dataset": trainer.dataset.name,
        "seed": seed,
        "batch": trainer.settings.batch,
        **settings,
    }


def _check_shared(folder: pathlib.Path) -> None:
    """Makes a folder, and makes sure that every process sees the same one.

    The first process writes a random number into a file and sends it to the others, which must find it there.

    Args:
      folder: it is made when it is not there.

    Raises:
      SettingError: in every process, if one of them cannot write to the folder or sees another.
    """
    token, first = secrets.randbits(31), jax.process_index() == 0
    path = folder / "processes.token"
    problem = ""
    try:
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(str(token))
    except OSError as error:
        problem = str(error)
    if jax.process_count() > 1:
        token = int(multihost_utils.broadcast_one_to_all(np.uint32(token)))
        found = not problem and _appears(path, str(token))
        blind = np.flatnonzero(~multihost_utils.process_allgather(np.asarray([found])).reshape(-1))
        if len(blind) and not problem:
            problem = f"process {', '.join(map(str, blind))} does not see what process 0 writes there"
    if first:
        path.unlink(missing_ok=True)
    if problem:
        raise SettingError(
            f"cannot save in {folder}: {problem}; name a folder that every process can write to and share"
        )


def _appears(path: pathlib.Path, text: str) -> bool:
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            if path.read_text() == text:
                return True
        except OSError:
            pass
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
