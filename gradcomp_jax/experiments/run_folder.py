"""The folder of a run: locked while it is active, and everything that is not of this run is left as it is."""

import contextlib
import dataclasses
import os
import pathlib
import re
import secrets
from collections.abc import Iterator

from gradcomp_jax._errors import SettingError
from gradcomp_jax._files import is_draft, local_folder, lock_file
from gradcomp_jax.experiments import record as records
from gradcomp_jax.experiments.record import Mark, Record, What
from gradcomp_jax.training.checkpoint_parts import delete

RECORD = "run.json"
_LOCK = "run.lock"
_KEPT = 2
"""Epochs whose states stay in the folder: should the newest be damaged, there is one to go back to."""

_LATER: What = {"optimizer": "sgd", "schedule": "constant"}
"""Settings that older records do not name, and what they were."""

_STATE = re.compile(r"epoch-([1-9][0-9]{0,9})")
# What is beside a state while it is written, by Orbax and by save_checkpoint.
_BESIDE = re.compile(r"epoch-([1-9][0-9]{0,9})(\.gradcomp-(new|old)|\.orbax-checkpoint-tmp.*)")


def check_free(folder: pathlib.Path, *, share: bool) -> None:
    """Makes sure that a run may save in a folder: a new one, an empty one, one with a run, or any if it is to be shared."""
    try:
        names = os.listdir(local_folder(folder))
    except FileNotFoundError:
        if folder.is_symlink():
            raise SettingError(f"{folder} is a link to nothing: name a folder") from None
        return
    except NotADirectoryError as error:
        raise SettingError(f"{folder} is not a folder: name one to save in") from error
    except OSError as error:
        raise SettingError(f"cannot save in {folder}: {error.strerror}") from error
    foreign = sorted(name for name in names if name != _LOCK and not is_draft(name, RECORD))
    if foreign and RECORD not in names and not share:
        listed = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise SettingError(
            f"{folder} holds {listed} and no run: name a new or an empty folder, or add --share-folder to save beside what"
            " is there, which stays as it is"
        )


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Keeps other runs out of a folder; however the process ends, the operating system lets go of it."""
    try:
        number = lock_file(folder / _LOCK, wait=False)
    except BlockingIOError as error:
        raise SettingError(f"another run is going on in {folder}: wait for its end, or name another folder") from error
    try:
        yield
    finally:
        os.close(number)


class RunFolder:
    """The files of one run in its folder. A state is of this run if a mark in it says so."""

    def __init__(self, path: pathlib.Path, record: Record) -> None:
        """Takes an absolute path, and how far the run has come."""
        self.path = path
        self.record = record

    @classmethod
    def opened(cls, path: pathlib.Path, what: What, workers: int, steps_per_epoch: int) -> "RunFolder":
        """Reads what is there of a run; where nothing is saved, begins one and says so in the folder."""
        for entry in _entries(path):
            # A process was killed while it wrote.
            if is_draft(entry.name, RECORD) and entry.is_file(follow_symlinks=False):
                os.unlink(entry)
        record = records.read_record(path / RECORD, steps_per_epoch)
        if record is None or record.epoch == 0:
            # The first state of a run that was killed may be there: it is of this one, under the same name.
            run, saving = (secrets.token_hex(8), None) if record is None else (record.run, record.saving)
            record = Record(run=run, what=dict(what), workers=workers, saving=saving)
            records.write(path / RECORD, record)
        folder = cls(path, record)
        folder.check_same(what)
        for epoch in record.deleting:
            # A process was killed after it had deleted what was in the folder. One that is not empty stays.
            with contextlib.suppress(OSError):
                folder.state(epoch).rmdir()
        folder.record = dataclasses.replace(record, deleting=())
        return folder

    @classmethod
    def seen(cls, path: pathlib.Path, steps_per_epoch: int) -> "RunFolder":
        """Reads what the first process has opened."""
        record = records.read_record(path / RECORD, steps_per_epoch)
        if record is None:
            raise SettingError(f"there is no {RECORD} in {path}: name a folder that every process shares")
        return cls(path, record)

    def check_same(self, what: What) -> None:
        """Makes sure that the run is of the method, the data and the settings that are asked for."""
        for name, value in what.items():
            if (have := self.record.what.get(name, _LATER.get(name))) != value:
                raise SettingError(
                    f"{self.path} holds a run with {name} {have}, not {value}: use the same value or another folder"
                )

    def state(self, epoch: int) -> pathlib.Path:
        """Returns where the state of an epoch is."""
        return self.path / f"epoch-{epoch}"

    def saved(self) -> list[int]:
        """Returns the epochs whose states are there, the last one first."""
        last = self.record.epoch
        if not last:
            return []
        mark = records.read_mark(self.state(last))
        if os.path.lexists(self.state(last)) and mark != self._mark(last):
            what = f"that of epoch {mark.epoch}" if mark and mark.run == self.record.run else "not of this run"
            raise SettingError(
                f"{self.state(last)} should be the state after epoch {last} and is {what}: put the right one back, or move "
                "this away to go on from the epoch before"
            )
        return sorted((epoch for epoch in self._own_states() if epoch <= last), reverse=True)

    def check_places(self, epochs: range) -> None:
        """Makes sure that nothing is where states will be saved."""
        for entry in _entries(self.path):
            found = _STATE.fullmatch(entry.name) or _BESIDE.fullmatch(entry.name)
            if found and int(found[1]) in epochs and not self._is_own(entry, int(found[1])):
                raise SettingError(
                    f"{entry.path} is not of the run in {self.path} and is in its way: move it away, or use another folder"
                )

    def start_saving(self, epoch: int) -> None:
        """Says that the state of an epoch is about to be written."""
        self.check_places(range(epoch, epoch + 1))
        self._write(dataclasses.replace(self.record, saving=epoch))

    def finish_saving(self, done: Record) -> None:
        """Marks the state of an epoch, records it, and deletes the run's older states.

        A process that is stopped at any moment leaves a record whose state is complete.
        """
        records.write_mark(self.state(done.epoch), self._mark(done.epoch))
        older = tuple(epoch for epoch in self._own_states() if epoch <= done.epoch - _KEPT)
        self._write(dataclasses.replace(done, deleting=older))
        for epoch in older:
            # What cannot be deleted now is tried again after the next epoch.
            with contextlib.suppress(OSError):
                delete(self.state(epoch), last=records.MARK)
        left = tuple(epoch for epoch in older if os.path.lexists(self.state(epoch)))
        with contextlib.suppress(OSError):
            # An empty folder that comes to the place of a deleted one is somebody else's.
            self._write(dataclasses.replace(done, deleting=left))

    def _write(self, record: Record) -> None:
        records.write(self.path / RECORD, record)
        self.record = record

    def _mark(self, epoch: int) -> Mark:
        return Mark(self.record.run, epoch)

    def _own_states(self) -> list[int]:
        found = [(entry, _STATE.fullmatch(entry.name)) for entry in _entries(self.path)]
        numbers = [int(match[1]) for entry, match in found if match and entry.is_dir(follow_symlinks=False)]
        return [epoch for epoch in numbers if records.read_mark(self.state(epoch)) == self._mark(epoch)]

    def _is_own(self, entry: os.DirEntry[str], epoch: int) -> bool:
        if not entry.is_dir(follow_symlinks=False):
            return False
        return epoch == self.record.saving or records.read_mark(pathlib.Path(entry)) == self._mark(epoch)


def _entries(folder: pathlib.Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)
