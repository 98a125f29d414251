"""How the processes of an island agree: the first of them decides, and the others are told at the same call."""

import itertools
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gradcomp_jax import _compat
from gradcomp_jax._errors import SettingError
from gradcomp_jax._typing import PyTree
from gradcomp_jax.islands.gathering import Whole, placed, refuse_elsewhere
from gradcomp_jax.islands.host_codec import Codec
from gradcomp_jax.islands.log import IslandError
from gradcomp_jax.islands.outer import Vector

MEETINGS = 8
"""Meetings of the processes from one departure to the next; what comes between two of them waits for the later one."""

_KINDS = {
    kind.__name__: kind
    for kind in (IslandError, SettingError, ValueError, TimeoutError, OSError, ImportError, RuntimeError)
}
"""Errors that are the same in all processes; any other is a RuntimeError with its name where it did not come up."""

_JOIN_TIMEOUT_S = 300.0
_SLICE_S = 2.0
"""Seconds of one wait, after which Python may handle a signal."""

_ALL = "all processes of a JAX program are one island, and join it with the same arguments"
_joins = itertools.count()
"""Numbers the islands of this program: every process joins them in the same order."""

Action = Callable[[], tuple[Any, Any]]
"""Returns what all processes are told, as JSON has it, and what stays in the first."""


class Processes:
    """Is the only process of an island. :class:`Several` is one of more.

    Attributes:
        first: whether this process decides. It has the folder, the thread and the store.
    """

    first = True

    def check_equal(self, arguments: Mapping[str, Any]) -> None:
        """Compares what all processes must have been told."""

    def meet(self, steps: int, every: int) -> bool:
        """Returns whether the processes meet at this step after the last departure, the same in all of them."""
        return True

    def decide(self, action: Action, report: Callable[[], Mapping[str, float]] = dict) -> tuple[Any, Any]:
        """Does something in the first process. All processes call this together.

        Args:
            action: what to do.
            report: returns numbers for :meth:`reported`.

        Returns:
            What the action returned; in the other processes the second of it is ``None``.

        Raises:
            Exception: what the action raised, in all processes.
        """
        return action()

    def reported(self, report: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
        """Returns numbers of the first process; of several processes, those that it had when they met last."""
        return report()

    def give_up(self, error: BaseException) -> None:
        """Lets the next call of the other processes raise: this one leaves the island by an error."""

    def gathered(self, code: Codec, params: PyTree) -> Vector | None:
        """Returns the vector of parameters, in the first process. All processes call this together."""
        return code.flat(params)

    def placed(self, code: Codec, vector: Vector, params: PyTree) -> PyTree:
        """Returns the first process's vector in the place of the parameters. All processes call this together."""
        return jax.tree.map(placed, code.tree(vector), params)


class Several(Processes):
    """Is one of several processes of an island, which make the same calls in the same order.

    What the first decides, and what it raises, is a numbered message in JAX's coordination service. That needs no device, and
    the first never waits for the others. Parameters are gathered and spread by collectives of XLA, one at a time.
    """

    def __init__(
        self,
        service: Any,
        index: int,
        count: int,
        place: str,
        *,
        spread: Callable[[Any], Any] = multihost_utils.broadcast_one_to_all,
    ) -> None:
        """Takes what the processes share, and which of them this is.

        Args:
            service: the client of the coordination service, which keeps strings under keys.
            index: of this process.
            count: of all.
            place: what the keys of this island begin with.
            spread: returns the first process's array, in all.
        """
        self.first = index == 0
        self._service, self._index, self._count, self._place, self._spread = service, index, count, place, spread
        self._calls = itertools.count()
        self._reported: Mapping[str, float] = {}

    def check_equal(self, arguments: Mapping[str, Any]) -> None:
        """Compares what all processes must have been told.

        Raises:
            SettingError: in all processes, if they differ, or if one does not come in time.
        """
        text = json.dumps(arguments)
        if self.first:
            self.decide(lambda: self._compare(json.loads(text)))
        else:
            self._service.key_value_set(f"{self._place}/joined/{self._index}", text)
            # Process 0 waits for the others for the same time, and may come as late as they.
            self._told(within=2 * _JOIN_TIMEOUT_S)

    def meet(self, steps: int, every: int) -> bool:
        """Returns whether the processes meet at this step after the last departure."""
        return steps == every or steps % max(1, every // MEETINGS) == 0

    def decide(self, action: Action, report: Callable[[], Mapping[str, float]] = dict) -> tuple[Any, Any]:
        """Does something in the first process, and tells the others."""
        if not self.first:
            return self._told(), None
        try:
            told, kept = action()
            self._reported = report()
        except Exception as error:
            self._tell(None, error)
            raise
        self._tell(told)
        return told, kept

    def reported(self, report: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
        """Returns the first process's numbers of the last meeting: loops that end by them end in all processes at once."""
        return dict(self._reported)

    def give_up(self, error: BaseException) -> None:
        """Lets the next call of the other processes raise."""
        if self.first:
            self._tell(None, RuntimeError(f"process 0 left the island: {type(error).__name__}: {error}"))

    def gathered(self, code: Codec, params: PyTree) -> Vector | None:
        """Returns the vector of parameters, in the first process."""

        def refuse() -> tuple[None, None]:
            code.check(params)
            refuse_elsewhere(params)
            return None, None

        # Before anybody waits in a collective.
        self.decide(refuse, lambda: self._reported)
        whole = jax.tree.map(Whole, params)
        if self.first:
            return code.flat(whole)
        for leaf in jax.tree.leaves(whole):
            if leaf.has_parts:
                np.asarray(leaf)
        return None

    def placed(self, code: Codec, vector: Vector | None, params: PyTree) -> PyTree:
        """Returns the first process's vector in the place of the parameters, the same bits in all processes."""
        # What the others give to a collective is not read, and takes no memory until then.
        given = np.broadcast_to(np.float32(0), code.size) if vector is None else vector
        return jax.tree.map(lambda new, old: placed(self._spread(new), old), code.tree(given), params)

    def _compare(self, own: Mapping[str, Any]) -> tuple[None, None]:
        until = time.monotonic() + _JOIN_TIMEOUT_S
        for index in range(1, self._count):
            key = f"{self._place}/joined/{index}"
            text = self._wait(key, until)
            if text is None:
                raise SettingError(f"process {index} did not join within {_JOIN_TIMEOUT_S:g} s: {_ALL}")
            self._service.key_value_delete(key)
            other = json.loads(text)
            for name, value in own.items():
                if other.get(name) != value:
                    raise SettingError(
                        f"{name} is {value!r} in process 0 and {other.get(name)!r} in process {index}: {_ALL}"
                    )
        return None, None

    def _tell(self, told: Any, error: Exception | None = None) -> None:
        described = None
        if error is not None:
            names = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS]
            described = (names[0], str(error)) if names else ("RuntimeError", f"{type(error).__name__}: {error}")
        message = json.dumps((told, described, dict(self._reported)))
        self._service.key_value_set(f"{self._place}/{next(self._calls)}", message)

    def _told(self, within: float | None = None) -> Any:
        key = f"{self._place}/{next(self._calls)}"
        text = self._wait(key, None if within is None else time.monotonic() + within)
        if text is None:
            raise SettingError(f"process 0 did not join within {within:g} s: {_ALL}")
        # Whoever is the last to read a message deletes it.
        if self._service.key_value_increment(f"{key}/read", 1) == self._count - 1:
            self._service.key_value_delete(key)
        told, error, self._reported = json.loads(text)
        if error is not None:
            raise _KINDS[error[0]](error[1])
        return told

    def _wait(self, key: str, until: float | None) -> str | None:
        """Waits for the value of a key and returns it; ``None`` if it does not come in time."""
        while True:
            left = _SLICE_S if until is None else max(until - time.monotonic(), 0.0)
            try:
                return str(self._service.blocking_key_value_get(key, max(1, round(1000 * min(left, _SLICE_S)))))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if left == 0:
                    return None


def of_program() -> Processes:
    """Returns the processes of this JAX program.

    Raises:
        SettingError: if there are several that JAX's coordination service does not know.
    """
    if jax.process_count() == 1:
        return Processes()
    shared = _compat.key_value_store()
    if shared is None:
        raise SettingError("the processes of an island agree through JAX: call jax.distributed.initialize() first")
    return Several(*shared, f"gradcomp_jax/islands/{next(_joins)}")
