"""A sentence about a process that ended without a word."""

import contextlib
import subprocess
import sys

# Reads until the process that started it writes "." or is gone.
_PROGRAM = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if not os.read(0, 1):
    sys.stderr.write(sys.argv[1] + chr(10))
"""

FAILED = 1
"""Exit code of a process that lost the others."""


class ExitNotice:
    """A child process that prints a sentence to stderr if this one ends before it is dismissed.

    JAX's coordination service ends a process from within, without a word to Python, and a killed process cannot print
    anything: another process has to.
    """

    def __init__(self, sentence: str) -> None:
        """Starts to watch this process."""
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, sentence],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Ends the child without a word. A second call does nothing."""
        with contextlib.suppress(OSError, ValueError):
            self._child.communicate(b".", timeout=5)
