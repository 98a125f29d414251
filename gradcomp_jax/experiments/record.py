"""What a folder says of the run in it, read with suspicion: people edit files, and disks fail."""

import json
import pathlib
import warnings
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import pydantic

from gradcomp_jax._errors import SettingError
from gradcomp_jax._files import read_file, write_whole

MARK = "run.mark"
_LARGEST_RECORD = 1 << 30
_LARGEST_MARK = 1 << 12
_EPOCHS = 1 << 31

What: TypeAlias = Mapping[str, str | bool | int | float | None]
"""Method, data set, seed and settings: what two runs must have in common for one to go on with the other."""

_Name = Annotated[str, pydantic.Field(pattern="^[0-9a-f]{16}$")]
_Epoch = Annotated[int, pydantic.Field(ge=1, le=_EPOCHS)]
_Floats = Annotated[tuple[float, ...], pydantic.FailFast()]
_Seconds = Annotated[
    tuple[Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)], ...],
    pydantic.FailFast(),
]


class _Strict(pydantic.BaseModel):
    # A number in quotes is not a number, and a field more is of another program.
    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True, ser_json_inf_nan="constants")


_Model = TypeVar("_Model", bound=_Strict)


class Record(_Strict):
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

    format: Literal["gradcomp_jax run 1"] = "gradcomp_jax run 1"
    run: _Name
    what: dict[str, str | bool | int | float | None]
    workers: Annotated[int, pydantic.Field(ge=1)]
    epoch: Annotated[int, pydantic.Field(ge=0, le=_EPOCHS)] = 0
    loss: _Floats = ()
    evaluation: _Floats = ()
    seconds: _Seconds = ()
    saving: _Epoch | None = None
    deleting: tuple[_Epoch, ...] = ()

    def until(self, epoch: int, steps: int) -> "Record":
        """Returns the record as it was after an earlier epoch of as many steps."""
        cut = {"loss": self.loss[: epoch * steps], "seconds": self.seconds[: epoch * steps]}
        return self.model_copy(update={"epoch": epoch, "evaluation": self.evaluation[:epoch], **cut})


class _Saved(Record):
    """A record as it is in a file: with a CRC-32 of all that it says, which earlier versions did not write."""

    crc32: Annotated[int, pydantic.Field(ge=0)] | None = None


class Mark(_Strict):
    """What a state has in its folder: the run and the epoch that it is of."""

    run: _Name
    epoch: _Epoch


def read_record(path: pathlib.Path, steps_per_epoch: int) -> Record | None:
    """Returns the record at a path, or ``None`` if nothing is there."""
    try:
        saved = _read(_Saved, path, _LARGEST_RECORD)
    except (OSError, ValueError) as error:
        raise _not_a_record(path, _reason(error)) from error
    if saved is None:
        return None
    record = Record.model_construct(**{name: getattr(saved, name) for name in Record.model_fields})
    if saved.crc32 is None:
        warnings.warn(
            f"{path} has no digest, because an earlier version wrote it: its figures are taken as they are, and have one when"
            " the next epoch is saved",
            stacklevel=2,
        )
    elif saved.crc32 != _crc_of(record):
        raise _not_a_record(path, "it differs from what was saved")
    steps = record.epoch * steps_per_epoch
    wanted = {"loss": steps, "seconds": steps, "evaluation": record.epoch}
    for name, count in wanted.items():
        if (have := len(getattr(record, name))) != count:
            raise _not_a_record(path, f"{record.epoch} epochs have {count} values of {name}, not {have}")
    return record


def read_mark(folder: pathlib.Path) -> Mark | None:
    """Returns the mark of a state, or ``None`` if the folder, which may be anybody's, has none that can be read."""
    if folder.is_symlink():
        return None
    try:
        return _read(Mark, folder / MARK, _LARGEST_MARK)
    except (OSError, ValueError):
        return None


def write(path: pathlib.Path, record: Record) -> None:
    """Writes a record in the place of an earlier one, in one go."""
    saved = _Saved.model_construct(**dict(record), crc32=_crc_of(record))
    write_whole(path, saved.model_dump_json(), follow=False)


def write_mark(folder: pathlib.Path, mark: Mark) -> None:
    """Writes the mark into the folder of a state."""
    write_whole(folder / MARK, mark.model_dump_json(), follow=False)


def _crc_of(record: Record) -> int:
    # By what the numbers are, which every release writes alike.
    return zlib.crc32(json.dumps(record.model_dump(), sort_keys=True).encode())


def _read(model: type[_Model], path: pathlib.Path, limit: int) -> _Model | None:
    content = read_file(path, limit=limit)
    return None if content is None else model.model_validate_json(content)


def _reason(error: Exception) -> str:
    if isinstance(error, pydantic.ValidationError):
        first: Any = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        return f"{where}: {first['msg']}" if where else first["msg"]
    return getattr(error, "strerror", None) or str(error)


def _not_a_record(path: pathlib.Path, reason: str) -> SettingError:
    return SettingError(f"{path} is not the record of a run ({reason}): use another folder")
