"""What a folder says of the run in it, read with suspicion: people edit files, and disks fail."""

import dataclasses
import json
import pathlib
import re
import warnings
import zlib
from collections.abc import Mapping
from typing import Any, TypeAlias

from gradcomp_jax._errors import SettingError
from gradcomp_jax._files import read_file, write_whole

MARK = "run.mark"
_LARGEST_RECORD = 1 << 30
_LARGEST_MARK = 1 << 12

What: TypeAlias = Mapping[str, str | bool | int | float | None]
"""Method, data set, seed and settings: what two runs must have in common for one to continue the other."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """How far a run has come.

    Attributes:
      format: of this file.
      run: a random name that the run has from its start.
      what: the method, what it trains on, and how.
      workers: how many it had.
      epoch: the last one whose state is saved, from 1; 0 before the first.
      loss: mean training loss of every step; not finite where it diverged.
      evaluation: the metric after every epoch.
      seconds: what every step took.
      saving: the epoch whose state is being written. What is there under its name may be incomplete, and is of this run.
      deleting: the epochs whose states are being deleted. An empty folder under such a name is of this run.
    """

    format: str = "gradcomp_jax run 1"
    run: str
    what: What
    workers: int
    epoch: int = 0
    loss: tuple[float, ...] = ()
    evaluation: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    saving: int | None = None
    deleting: tuple[int, ...] = ()

    def until(self, epoch: int, steps: int) -> "Record":
        """Returns the record as it was after an earlier epoch of as many steps."""
        cut: dict[str, Any] = {"loss": self.loss[: epoch * steps], "seconds": self.seconds[: epoch * steps]}
        return dataclasses.replace(self, epoch=epoch, evaluation=self.evaluation[:epoch], **cut)


@dataclasses.dataclass(frozen=True)
class Mark:
    """What a state has in its folder: the run and the epoch that it is of."""

    run: str
    epoch: int


def read_record(path: pathlib.Path, steps_per_epoch: int) -> Record | None:
    """Returns the record at a path, or ``None`` if nothing is there; its CRC-32 tells whether it is what was saved."""
    try:
        read = _read(path, _LARGEST_RECORD)
        if read is None:
            return None
        digest = read.pop("crc32", None)
        if digest not in (None, _crc_of(read)):
            raise ValueError("it differs from what was saved")
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in read.items()}
        record = Record(**fields)
        if record.format != Record.format or not re.fullmatch("[0-9a-f]{16}", record.run):
            raise ValueError("it is of another program")
        if not all(type(n) is int for n in (record.workers, record.epoch, record.saving or 0, *record.deleting)):
            raise ValueError("its epochs are no whole numbers")
        steps = record.epoch * steps_per_epoch
        for name, count in {"loss": steps, "seconds": steps, "evaluation": record.epoch}.items():
            if (have := len(getattr(record, name))) != count:
                raise ValueError(f"{record.epoch} epochs have {count} values of {name}, not {have}")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).partition("\n")[0][:200]
        raise SettingError(f"{path} is not the record of a run ({reason}): use another folder") from error
    if digest is None:
        warnings.warn(
            f"{path} has no digest, because an earlier version wrote it: its figures are taken as they are, and have one"
            " when the next epoch is saved",
            stacklevel=2,
        )
    return record


def read_mark(folder: pathlib.Path) -> Mark | None:
    """Returns the mark of a state, or ``None`` if the folder, which may be anybody's, has none that can be read."""
    if folder.is_symlink():
        return None
    try:
        found = _read(folder / MARK, _LARGEST_MARK)
        return None if found is None else Mark(**found)
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def write(path: pathlib.Path, record: Record) -> None:
    """Writes a record over an earlier one, in one go."""
    fields = vars(record)
    write_whole(path, json.dumps({**fields, "crc32": _crc_of(fields)}), follow=False)


def write_mark(folder: pathlib.Path, mark: Mark) -> None:
    """Writes the mark into the folder of a state."""
    write_whole(folder / MARK, json.dumps(vars(mark)), follow=False)


def _crc_of(fields: Mapping[str, Any]) -> int:
    # By what the numbers are, which every release writes alike.
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _read(path: pathlib.Path, limit: int) -> dict[str, Any] | None:
    content = read_file(path, limit=limit)
    found = None if content is None else json.loads(content)
    if content is not None and not isinstance(found, dict):
        raise ValueError("it is no object of JSON")
    return found
