"""What one process of several does when it cannot continue: it prints one sentence and ends, and the others notice."""

import os
import sys
import threading
import time
import traceback
from typing import Any, Self

import jax

from gradcomp_jax.distributed.address import ClusterError
from gradcomp_jax.distributed.exit_notice import FAILED, ExitNotice


class Watchdog:
    """Ends this process when the others are lost, within a known time.

    Inside ``with``, an exception of JAX, a process that is killed from within or from outside, and a step that takes longer
    than ``step_timeout`` all give one sentence on stderr and exit code 1. The process ends at once, without the barrier of an
    orderly exit: the others see its connections close, and end as well.

    Example::

        gc.distributed.join(gc.distributed.find_place(), heartbeat_timeout=100)
        with gc.distributed.Watchdog(step_timeout=300, remedy="restart all processes from the last checkpoint") as watchdog:
            for batch in batches:
                state, metrics = step(state, batch)
                jax.block_until_ready(metrics)
                watchdog.beat()
    """

    def __init__(
        self, *, step_timeout: float, remedy: str, passes: tuple[type[BaseException], ...] = (), name: str = "gradcomp"
    ) -> None:
        """Prepares a watchdog for this process.

        Args:
          step_timeout: seconds from one :meth:`beat` to the next.
          remedy: what the user can do, for the end of the message.
          passes: exceptions that leave the ``with`` block unchanged, because every process raises them.
          name: name of the program, for the beginning of the message.
        """
        self._step_timeout = step_timeout
        self._name = f"{name}: process {jax.process_index()} of {jax.process_count()}"
        self._remedy = remedy
        self._passes = passes
        self._over = threading.Event()
        self._heard = time.monotonic()

    def __enter__(self) -> Self:
        """Starts to watch the loop."""
        self.beat()
        self._notice = ExitNotice(f"{self._name} ended before the run was done: {self._remedy}")
        threading.Thread(target=self._watch, name="step timeout", daemon=True).start()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Stops watching; ends the process for an error that other processes may not have."""
        self._over.set()
        ends_well = isinstance(error, SystemExit) and not error.code
        if error is None or ends_well or isinstance(error, self._passes):
            self._notice.dismiss()
        elif _is_loss(error):
            reason = str(error).strip().partition("\n")[0]
            self._end(f"lost another process, or the link to it ({reason})")
        elif isinstance(error, KeyboardInterrupt):
            self._end("was interrupted")
        else:
            traceback.print_exception(error)
            self._end(f"stopped ({type(error).__name__})")

    def beat(self) -> None:
        """Says that the run continues: call it after every step, compilation and save."""
        self._heard = time.monotonic()

    def say(self, sentence: str) -> None:
        """Prints a sentence to stderr even if this process is ended at the same moment; use it before an exception that passes.

        JAX may end a process that has lost the others at any moment. Nothing else is printed afterwards.
        """
        self._notice.print(sentence)

    def _watch(self) -> None:
        while not self._over.wait(min(self._step_timeout / 10, 1.0)):
            if time.monotonic() - self._heard > self._step_timeout:
                self._end(f"waited {self._step_timeout:g} s for a step, which no other process seems to answer")

    def _end(self, what: str) -> None:
        sys.stdout.flush()
        self._notice.print(f"{self._name} {what}: {self._remedy}")
        os._exit(FAILED)


def _is_loss(error: BaseException) -> bool:
    """Returns whether an error means that other processes are gone: a failed collective, or a barrier that no other reached."""
    failed = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error)
    return failed or isinstance(error, TimeoutError | ClusterError)
