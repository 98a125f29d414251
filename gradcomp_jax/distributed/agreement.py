"""Compares what must be equal in all processes, before a difference can do harm."""

import hashlib
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gradcomp_jax import _compat
from gradcomp_jax._errors import SettingError, numbered
from gradcomp_jax.distributed.address import ClusterError
from gradcomp_jax.distributed.digests import digest

_calls = itertools.count()
"""Numbers the calls: every process makes the same calls in the same order, so a call's number is its name."""

_SLICE_S = 2.0
"""Seconds of one wait, after which Python may handle a signal."""

_MOST_SHOWN = 3
_NOTHING = "null"


def check_equal(
    values: Mapping[str, Any], *, remedy: str = "start all of them with the same", timeout: float = 300
) -> None:
    """Compares values in all processes of ``jax.distributed``, and raises in all of them if they differ.

    All processes call this together. It needs no devices and compiles nothing: process 0 reads what all processes have put into
    the coordination service, and they read its verdict. With one process nothing happens. :func:`digest` turns arrays into
    values.

    Example::

        gc.distributed.check_equal({"learning rate": 0.1, "data": sha256_of_my_files, **gc.distributed.digest(params)})

    Args:
      values: names and values. Values may be anything that JSON can hold, arrays (compared bit by bit) and sets; of any other
        type the text is compared.
      remedy: what the user can do, for the end of the message.
      timeout: seconds to wait for the others.

    Raises:
      SettingError: if values differ. The message names up to three of them, their values and the processes.
      ClusterError: if a process does not come in time.
    """
    _, found = compare(values, timeout=timeout)
    if found:
        raise SettingError(f"the processes differ: {found}: {remedy}")


def compare(values: Mapping[str, Any], *, timeout: float) -> tuple[str | None, str]:
    """Returns, in all processes, the first name whose values differ, and a description of what differs.

    If nothing differs, ``None`` and the empty string.
    """
    shared = _compat.key_value_store()
    if shared is None:
        return None, ""
    store, index, count = shared
    call = next(_calls)
    place = f"gradcomp_jax/equal/{call}"
    texts = {str(name): json.dumps(value, sort_keys=True, default=_plain) for name, value in values.items()}
    until = time.monotonic() + timeout
    if index:
        store.key_value_set(f"{place}/{index}", json.dumps(texts))
        # Process 0 waits for the same time, and needs a moment to say so.
        verdict = _read(store, f"{place}/verdict", until + 5)
        if verdict is None:
            raise ClusterError(f"process 0 did not come to the comparison of the processes within {timeout:g} s")
    else:
        verdict = _judge(store, place, texts, count, until, timeout)
        # Once all processes have put in their values, all have read the verdict of the call before.
        store.key_value_delete(f"gradcomp_jax/equal/{call - 1}/verdict")
        store.key_value_set(f"{place}/verdict", verdict)
    outcome = json.loads(verdict)
    if "late" in outcome:
        raise ClusterError(outcome["late"])
    return outcome["first"], outcome["words"]


def _plain(value: Any) -> Any:
    """Returns a JSON value for one that JSON cannot hold; of an array all entries count, not only those that its text shows."""
    if isinstance(value, jax.Array):
        return digest(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{value.dtype}{list(value.shape)}, sha256 {hashlib.sha256(value.tobytes()).hexdigest()[:16]}"
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    return str(value)


def _judge(store: Any, place: str, own: dict[str, str], count: int, until: float, timeout: float) -> str:
    told = [own]
    for index in range(1, count):
        text = _read(store, f"{place}/{index}", until)
        if text is None:
            late = f"process {index} did not come to the comparison of the processes within {timeout:g} s"
            return json.dumps({"late": late})
        store.key_value_delete(f"{place}/{index}")
        told.append(json.loads(text))
    differing = _differing(told)
    return json.dumps({"first": differing[0] if differing else None, "words": difference(told)})


def _read(store: Any, key: str, until: float) -> str | None:
    """Waits for the value of a key and returns it; ``None`` if it does not come in time."""
    while True:
        left = max(until - time.monotonic(), 0.0)
        try:
            return str(store.blocking_key_value_get(key, max(1, round(1000 * min(left, _SLICE_S)))))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if left == 0:
                return None


def difference(told: Sequence[Mapping[str, str]]) -> str:
    """Returns a description of what differs between processes; the empty string if nothing does."""
    differing = _differing(told)
    shown = "; ".join(_spread(name, [each.get(name, _NOTHING) for each in told]) for name in differing[:_MOST_SHOWN])
    more = len(differing) - _MOST_SHOWN
    return shown + (f"; and {more} more" if more > 0 else "")


def _differing(told: Sequence[Mapping[str, str]]) -> list[str]:
    names = dict.fromkeys(itertools.chain.from_iterable(told))
    return [name for name in names if len({each.get(name, _NOTHING) for each in told}) > 1]


def _spread(name: str, values: Sequence[str]) -> str:
    """Says which processes have which value; long values are shown from near the first difference."""
    by_value: dict[str, list[int]] = {}
    for index, value in enumerate(values):
        by_value.setdefault(value, []).append(index)
    kinds = [f"{_short(value, by_value)} in {numbered(where)}" for value, where in by_value.items()]
    if len(kinds) > _MOST_SHOWN:
        kinds = [*kinds[:_MOST_SHOWN], f"{len(kinds) - _MOST_SHOWN} other values elsewhere"]
    return f"{name} is {', '.join(kinds[:-1])} and {kinds[-1]}"


def _short(value: str, values: Sequence[str] | Mapping[str, Any], most: int = 60) -> str:
    if value == _NOTHING:
        return "not set"
    if len(value) <= most:
        return value.strip('"')
    texts = list(values)
    parted = next((i for i, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), 0)
    first = max(0, min(parted - 10, len(value) - most))
    return ("..." if first else "") + value[first : first + most] + ("..." if first + most < len(value) else "")
