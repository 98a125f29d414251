"""A run that is saved after every epoch, and continues from what is saved."""

import contextlib
import dataclasses
import os
import pathlib
import re
import secrets
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax

from gradcomp_jax import _everyone
from gradcomp_jax._errors import SettingError
from gradcomp_jax._files import local_folder, read_file, write_whole
from gradcomp_jax.experiments import record as records
from gradcomp_jax.experiments import run_folder
from gradcomp_jax.experiments.listeners import Listener, Listeners, Past
from gradcomp_jax.experiments.results import RunResult
from gradcomp_jax.experiments.run import Trainer
from gradcomp_jax.experiments.run_folder import RunFolder
from gradcomp_jax.training import restore_checkpoint, save_checkpoint
from gradcomp_jax.training.checkpoint import DamagedCheckpointError

_T = TypeVar("_T")

# A network file system may show a new file on other machines only after a while.
_TIMEOUT_S = 5.0


def train_with_checkpoints(
    trainer: Trainer,
    seed: int,
    folder: pathlib.Path | None,
    *,
    share_folder: bool = False,
    listener: Listener | None = None,
) -> RunResult:
    """Trains, saves after every epoch, and starts from the last epoch saved if there is one.

    The result is that of a run which was never broken off, bit for bit. Of a run that has had all its epochs the result is
    read and nothing is trained. Where the number of workers has changed and the batch has not, the run continues with its
    per-device state handed to the new workers. The states of the last two epochs are kept; delete the newest (``epoch-N``)
    and the run continues from the one before. With several processes all of them call this, with a folder that all of them
    see; how many there were before does not matter.

    The folder is locked until this returns. Only states with a mark of this run are read, replaced or deleted, and
    the empty folder of one whose deletion was cut off.

    Args:
      trainer: of the method, on the problem.
      seed: of the run.
      folder: made if it is not there; ``None`` to save nothing. A link to a folder is followed; no link within it is.
      share_folder: saves also where there are other files and no run. They stay as they are.
      listener: hears how the run proceeds.
    """
    listener = listener or Listener()
    if folder is None:
        return trainer.run(seed, listener=listener)
    with _opened(trainer, seed, local_folder(folder), share_folder) as own:
        try:
            saved = own.saved()
        except OSError as error:
            raise SettingError(f"cannot read {own.path}: {_reason(error)}") from error
        if saved and saved[0] == own.record.epoch >= trainer.settings.epochs:
            return _finished(trainer, seed, own, listener)
        past = _restore(trainer, seed, own, saved) if own.record.epoch else None
        epochs = range(own.record.epoch + 1, trainer.settings.epochs + 1)
        _in_first(lambda: own.check_places(epochs), lambda reason: f"cannot read {own.path}: {reason}")
        return trainer.run(seed, listener=Listeners(_Saver(trainer, own), listener), past=past)


class _Saver(Listener):
    """Saves the state of every epoch, then the record that names it."""

    def __init__(self, trainer: Trainer, own: RunFolder) -> None:
        self._workers = trainer.settings.workers
        self._own = own

    def finished_epoch(self, method: str, seed: int, epoch: int, past: Past) -> None:
        own = self._own

        def failed(reason: str) -> str:
            kept = f"the last epoch saved is {own.record.epoch}" if own.record.epoch else "nothing is saved yet"
            return f"cannot save epoch {epoch} in {own.path}: {reason}; {kept}, and the same command goes on from there"

        _in_first(lambda: own.start_saving(epoch), failed)
        try:
            # It replaces what a process left that was killed while it saved this epoch.
            save_checkpoint(own.state(epoch), past.state, overwrite=True)
        except (OSError, ValueError) as error:
            raise SettingError(failed(_reason(error))) from error
        record = dataclasses.replace(
            own.record,
            epoch=epoch,
            workers=self._workers,
            saving=None,
            **{name: getattr(past, name) for name in ("loss", "evaluation", "seconds")},
        )
        _in_first(lambda: own.finish_saving(record), failed)
        own.record = record


@contextlib.contextmanager
def _opened(trainer: Trainer, seed: int, path: pathlib.Path, share: bool) -> Iterator[RunFolder]:
    """Locks the folder of a run in the first process, and reads it in all of them."""

    def failed(reason: str) -> str:
        return f"cannot save in {path}: {reason}; name a folder that can be written to"

    what, workers, steps = _describe(trainer, seed), trainer.settings.workers, trainer.steps_per_epoch
    with contextlib.ExitStack() as stack:

        def open_first() -> RunFolder:
            run_folder.check_free(path, share=share)
            # Before anything is written: a record that is not ours is in a folder that is not.
            records.read_record(path / run_folder.RECORD, steps)
            path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(run_folder.locked(path))
            # Another run may have begun in the meantime, and ended.
            run_folder.check_free(path, share=share)
            return RunFolder.opened(path, what, workers, steps)

        own = _in_first(open_first, failed)
        _check_shared(path)
        if own is None:
            own = RunFolder.seen(path, steps)
            own.check_same(what)
        yield own


def _finished(trainer: Trainer, seed: int, own: RunFolder, listener: Listener) -> RunResult:
    """Returns the result of a run that has had all its epochs."""
    record = own.record
    for name, have in (("epochs", record.epoch), ("workers", record.workers)):
        if have != getattr(trainer.settings, name):
            raise SettingError(
                f"{own.path} holds a run that has had its {record.epoch} epochs, with {record.workers} workers: ask for "
                f"as many {name} to see what it gave, or for more epochs to go on"
            )
    past = Past(None, record.loss, record.evaluation, record.seconds, trainer.problem.metric)
    result = trainer.result(seed, past)
    listener.started(trainer.method, seed, len(past.loss), len(past.loss))
    listener.finished(result)
    return result


def _restore(trainer: Trainer, seed: int, own: RunFolder, saved: list[int]) -> Past:
    if not saved:
        raise SettingError(
            f"{own.path / 'run.json'} says epoch {own.record.epoch}, and no state of it or an earlier one is there: use "
            "another folder"
        )
    epoch, *earlier = saved
    remedy = f"delete it to go on from epoch {earlier[0]}" if earlier else "start anew in another folder"
    try:
        state = restore_checkpoint(own.state(epoch), trainer.initial_state(seed))
    except DamagedCheckpointError as error:
        whole = str(error).rpartition(": ")[0]
        raise SettingError(f"{whole}: {remedy}") from error
    except (OSError, ValueError) as error:
        raise SettingError(f"{own.path} cannot be gone on with: {error}") from error
    if int(state.step) != epoch * trainer.steps_per_epoch:
        raise SettingError(
            f"{own.state(epoch)} is a state after {int(state.step)} steps, where epoch {epoch} ends at step "
            f"{epoch * trainer.steps_per_epoch}: {remedy}"
        )
    own.record = record = own.record.until(epoch, trainer.steps_per_epoch)
    return Past(state, record.loss, record.evaluation, record.seconds, trainer.problem.metric)


def _describe(trainer: Trainer, seed: int) -> dict[str, str | bool | int | float | None]:
    """Returns what two runs must have in common for one to continue the other."""
    settings = dataclasses.asdict(trainer.settings)
    # Workers may share the same batch anew; and more epochs are what a run continues for, unless its rate has fallen to zero.
    for name in ("workers", "batch_per_worker", *(["epochs"] if trainer.settings.schedule == "constant" else [])):
        del settings[name]
    return {
        "method": trainer.method,
        "dataset": trainer.problem.name,
        "seed": seed,
        "batch": trainer.settings.batch,
        **settings,
    }


def _in_first(action: Callable[[], _T], failed: Callable[[str], str]) -> _T | None:
    """Does something in the first process, and returns there what it gave; if it fails, all processes raise."""

    def told() -> _T:
        try:
            return action()
        except OSError as error:
            raise SettingError(failed(_reason(error))) from error

    return _everyone.in_first(told)


def _reason(error: Exception) -> str:
    """Says what went wrong, in one line; of an error of the operating system, in its words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror} ({error.filename})"
    # As TensorStore writes it, after a page of paths.
    if found := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(found[1]))
    return str(error).strip().partition("\n")[0][:300]


def _check_shared(folder: pathlib.Path) -> None:
    """Makes sure that every process sees the same folder.

    The first process writes a file whose name is a random number, and sends the number to the others, which must find it.
    """
    if jax.process_count() == 1:
        return
    first = jax.process_index() == 0
    token = _everyone.of_first(secrets.randbits(31))
    path = folder / f"processes-{token:08x}.token"
    try:
        _in_first(
            lambda: write_whole(path, str(token), follow=False), lambda reason: f"cannot save in {folder}: {reason}"
        )
        found = first or _appears(path, str(token).encode())
        blind = [index for index, sees in enumerate(_everyone.of_all(found)) if not sees]
    finally:
        if first:
            path.unlink(missing_ok=True)
    if blind:
        raise SettingError(
            f"cannot save in {folder}: process {', '.join(map(str, blind))} does not see what process 0 writes there; name a "
            "folder that every process can write to and share"
        )


def _appears(path: pathlib.Path, content: bytes) -> bool:
    until = time.monotonic() + _TIMEOUT_S
    while True:
        with contextlib.suppress(OSError):
            if read_file(path, limit=len(content)) == content:
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
