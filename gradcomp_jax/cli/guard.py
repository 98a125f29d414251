"""What a process of several does when it cannot go on: one sentence, and an end that the others notice."""

import os
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Self

import jax
import typer

from gradcomp_jax._errors import ExperimentError
from gradcomp_jax.cli.witness import FAILED, Witness
from gradcomp_jax.experiments import Listener, Past, RunResult


class Guard(Listener):
    """Ends this process when the others are lost, within a known time.

    Within ``with``, an exception of JAX, a process killed from within or without, and a step that takes longer than
    ``step_timeout`` all give one sentence on stderr and a non-zero exit code. The process ends at once, without the
    barrier of an orderly exit: the others see its connections close, and end as well.
    """

    def __init__(self, listener: Listener, *, step_timeout: float, remedy: str) -> None:
        """Guards this process of ``jax.distributed``, which must be initialized.

        Args:
          listener: what hears of the run; everything is passed on to it.
          step_timeout: seconds from one step (compilation, epoch, save) to the next.
          remedy: what the user can do, for the end of the sentence.
        """
        self._listener = listener
        self._step_timeout = step_timeout
        self._name = f"gradcomp: process {jax.process_index()} of {jax.process_count()}"
        self._remedy = remedy
        self._over = threading.Event()
        self._heard = time.monotonic()

    def __enter__(self) -> Self:
        """Starts to watch."""
        self._witness = Witness(f"{self._name} ended before the run was done: {self._remedy}")
        threading.Thread(target=self._watch, name="step timeout", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops watching; ends the process for an error that is not the user's to mend."""
        self._over.set()
        if error is None or isinstance(error, (ExperimentError, typer.Exit)):
            self._witness.dismiss()
        elif _is_loss(error):
            reason = str(error).strip().partition("\n")[0]
            self._end(f"lost another process, or the link to it ({reason})")
        elif isinstance(error, KeyboardInterrupt):
            self._end("was interrupted")
        else:
            traceback.print_exception(error)
            self._end(f"stopped ({type(error).__name__})")

    def compiling(self, method: str) -> None:
        """Passes it on."""
        self._beat()
        self._listener.compiling(method)

    def started(self, method: str, seed: int, steps: int) -> None:
        """Passes it on."""
        self._beat()
        self._listener.started(method, seed, steps)

    def stepped(self, method: str, seed: int, step: int, loss: float) -> None:
        """Passes it on."""
        self._beat()
        self._listener.stepped(method, seed, step, loss)

    def finished_epoch(self, method: str, seed: int, epoch: int, past: Past) -> None:
        """Passes it on."""
        self._beat()
        self._listener.finished_epoch(method, seed, epoch, past)

    def finished(self, result: RunResult) -> None:
        """Passes it on."""
        self._beat()
        self._listener.finished(result)

    def _beat(self) -> None:
        self._heard = time.monotonic()

    def _watch(self) -> None:
        while not self._over.wait(min(self._step_timeout / 10, 1.0)):
            if time.monotonic() - self._heard > self._step_timeout:
                self._end(f"waited {self._step_timeout:g} s for a step, which no other process seems to answer")

    def _end(self, what: str) -> None:
        self._witness.dismiss()
        sys.stdout.flush()
        print(f"{self._name} {what}: {self._remedy}", file=sys.stderr, flush=True)
        os._exit(FAILED)


def _is_loss(error: BaseException) -> bool:
    """Whether an error says that others are gone: a collective that failed, or a barrier (Orbax's) that nobody came to."""
    failed = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error)
    return failed or isinstance(error, TimeoutError)
