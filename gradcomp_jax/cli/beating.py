"""A listener that tells the watchdog of every event of a run."""

from gradcomp_jax.distributed import Watchdog
from gradcomp_jax.experiments import Listener, Past, RunResult


class Beating(Listener):
    """Passes every event on to another listener, and calls ``watchdog.beat()``."""

    def __init__(self, listener: Listener, watchdog: Watchdog) -> None:
        """Wraps a listener, which is told all that this one is told."""
        self._listener = listener
        self._watchdog = watchdog

    def compiling(self, method: str) -> None:
        """Passes the event on."""
        self._watchdog.beat()
        self._listener.compiling(method)

    def started(self, method: str, seed: int, steps: int) -> None:
        """Passes the call on to the listener."""
        self._watchdog.beat()
        self._listener.started(method, seed, steps)

    def stepped(self, method: str, seed: int, step: int, loss: float) -> None:
        """Passes the call on to the listener."""
        self._watchdog.beat()
        self._listener.stepped(method, seed, step, loss)

    def finished_epoch(self, method: str, seed: int, epoch: int, past: Past) -> None:
        """Passes the call on to the listener."""
        self._watchdog.beat()
        self._listener.finished_epoch(method, seed, epoch, past)

    def finished(self, result: RunResult) -> None:
        """Passes the call on to the listener."""
        self._watchdog.beat()
        self._listener.finished(result)
