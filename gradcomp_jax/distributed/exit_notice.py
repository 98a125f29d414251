"""Prints a sentence about a process that ended without a message."""

import contextlib
import subprocess
import sys
import threading

# Waits for a message from the process that started it, or for the end of that process, and prints the sentence.
_PROGRAM = """
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
last_words = sys.stdin.read() or sys.argv[1]
if last_words != ".":
    sys.stderr.write(last_words + chr(10))
"""

FAILED = 1
"""Exit code of a process that lost the others."""


class ExitNotice:
    """Runs a child process that prints a sentence to stderr if this process ends before the child is dismissed.

    JAX's coordination service ends a process from within, without telling Python, and a killed process cannot print
    anything, so another process has to.
    """

    def __init__(self, sentence: str) -> None:
        """Starts to watch this process."""
        self._lock = threading.Lock()
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, sentence],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Ends the child, which prints nothing. A second call does nothing."""
        self._send(".")

    def print(self, sentence: str) -> None:
        """Lets the child print this sentence instead of its own, and end.

        The child prints one of the two sentences even if this process ends from within at any moment. If this process dismissed
        the child and then printed the sentence itself, it could end before it has printed.
        """
        self._send(sentence)

    def _send(self, words: str) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            self._child.communicate(words.encode(), timeout=5)
