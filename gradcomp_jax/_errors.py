"""Errors that a user of the commands can cause, and can correct by reading the message."""

import contextlib
import difflib
import itertools
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

_T = TypeVar("_T")


class ExperimentError(ValueError):
    """Serves as the base of all errors that the user can correct: a name, a combination, a missing file."""


class UnknownNameError(ExperimentError):
    """Reports a method or a data set that no registry knows."""


class SettingError(ExperimentError):
    """Reports a value, or a combination of values, that no run can have."""


class MissingDataError(ExperimentError):
    """Reports a data set that is not on this machine; the message names the command that installs it."""


def look_up(kind: str, name: str, table: Mapping[str, _T]) -> _T:
    """Returns ``table[known_name(kind, name, table)]``."""
    return table[known_name(kind, name, table)]


def known_name(kind: str, name: str, table: Iterable[str]) -> str:
    """Returns the name as the table has it, or raises an error with the known names and the closest of them.

    In a name ``_`` and ``-`` are the same. ``kind`` says in messages what the names are: ``"method"``, ``"data set"``.
    """
    names = list(table)
    for spelled in (name, name.replace("_", "-"), name.replace("-", "_")):
        if spelled in names:
            return spelled
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise UnknownNameError(f"unknown {kind} {name!r}{hint} (known: {', '.join(names)})")


@contextlib.contextmanager
def users_code(name: str, file: str | None) -> Iterator[None]:
    """Turns an exception of the user's own code into one sentence, with the last line of ``file`` that it came through."""
    try:
        yield
    except ExperimentError:
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f" ({os.path.basename(file)}, line {lines[-1]})" if file and lines else ""
        text = str(error).strip().partition("\n")[0]
        raise SettingError(f"{name}: {type(error).__name__}: {text}{where}") from error


def listed(sentence: str, *cases: str) -> str:
    """Returns an error of a sentence, and what to do in each of some cases, on a line each: (a), (b), (c)."""
    return sentence + ":" + "".join(f"\n  ({chr(ord('a') + i)}) {case}" for i, case in enumerate(cases))


def numbered(indices: Sequence[int], one: str = "process", many: str = "processes") -> str:
    """Names processes by their numbers, in order: consecutive ones by the first and the last."""
    runs = [[n for _, n in run] for _, run in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0])]
    parts = [part for run in runs for part in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    shown = parts if len(parts) <= 4 else [*parts[:4], "others"]
    joined = f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0]
    return f"{one if len(indices) == 1 else many} {joined}"
