"""Who hears how runs proceed."""

import dataclasses
import functools
from typing import Any

from gradcomp_jax.experiments.results import Metric, RunResult, Wire


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Past:
    """All that a run needs to continue after an epoch.

    Attributes:
      state: the training state, placed on the mesh.
      loss: mean training loss of every step so far.
      evaluation: the metric after every epoch so far.
      seconds: what every step so far took.
      metric: what ``evaluation`` is.
    """

    state: Any
    loss: tuple[float, ...] = ()
    evaluation: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    metric: Metric = "accuracy"


class Listener:
    """Hears how runs proceed; every method here does nothing."""

    def compiling(self, method: str) -> None:
        """Tells that a step is about to be compiled."""

    def compiled(self, method: str, wire: Wire) -> None:
        """Tells that it is compiled, and what it sends."""

    def started(self, method: str, seed: int, steps: int, done: int) -> None:
        """Tells that a run of ``steps`` steps starts, or continues where ``done`` of them are past."""

    def stepped(self, method: str, seed: int, step: int, loss: float) -> None:
        """Tells that step ``step`` (from 1) of a run is done."""

    def finished_epoch(self, method: str, seed: int, epoch: int, past: Past) -> None:
        """Tells that epoch ``epoch`` (from 1) is done; ``past.state`` is valid until this returns."""

    def finished(self, result: RunResult) -> None:
        """Tells that a run is done."""


class Listeners(Listener):
    """Tells several listeners, in their order."""

    def __init__(self, *listeners: Listener) -> None:
        """Takes the listeners, the first of which hears of everything first."""
        self._listeners = listeners

    def _tell(self, what: str, *args: Any) -> None:
        for listener in self._listeners:
            getattr(listener, what)(*args)


for _name in [name for name in vars(Listener) if not name.startswith("_")]:
    setattr(Listeners, _name, functools.partialmethod(Listeners._tell, _name))
