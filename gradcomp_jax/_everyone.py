"""Shares plain values among the processes of a run, and what one of them does for all."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from gradcomp_jax._errors import SettingError

_T = TypeVar("_T")


def of_all(value: Any) -> list[Any]:
    """Returns the JSON values of all processes, by their index. All processes call this together."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.int32(text.size))).reshape(-1)
    # One program for texts of about the same length.
    padded = np.zeros(1 << (int(lengths.max()) - 1).bit_length(), np.uint8)
    padded[: text.size] = text
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(lengths), -1)
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]


def of_first(value: Any) -> Any:
    """Returns the JSON value of the first process, in all of them. All processes call this together."""
    return of_all(value)[0]


def in_first(action: Callable[[], _T]) -> _T | None:
    """Does something in the first process, and returns there what it gave; if it raises, all processes raise its sentence."""
    result, problem = None, None
    if jax.process_index() == 0:
        try:
            result = action()
        except Exception as error:
            problem = error
    told = of_first(problem and [str(problem), isinstance(problem, OSError)])
    if problem is not None:
        raise problem
    if told:
        raise (OSError if told[1] else SettingError)(told[0])
    return result
