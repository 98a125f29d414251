"""The process of the command: what SIGINT and SIGTERM do, and standard streams that are closed or full.

Only the standard library is imported, so that all of this works before JAX is imported.
"""

import contextlib
import errno
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

GRACE_S = 3.0
"""Seconds that a run has to finish its step, or a save."""

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class Stopped(KeyboardInterrupt):
    """Says that a signal asks the command to end. Only :func:`raise_if_stopped` raises it, and never during a step."""

    def __init__(self, number: int) -> None:
        """Takes the number of the signal."""
        super().__init__(number)
        self.code = 128 + number


class _Watch:
    """Runs a thread that waits for the first signal and ends the process.

    Python calls a signal handler in the main thread, between two bytecodes. A handler that raises has to wait for a
    compilation, its exception is lost in a callback, and what it leaves half done sometimes crashes the interpreter's shutdown.
    Python writes to the file descriptor of :func:`signal.set_wakeup_fd` at once, so a thread that reads it is in time.
    """

    def __init__(self) -> None:
        self._inner, self._outer = socket.socketpair()
        self._outer.setblocking(False)
        self.number = 0
        self.describe: Callable[[], str] = lambda: "gradcomp: stopped"
        self.grace_s = 0.0
        # A shell starts background commands with SIGINT ignored, and it must stay ignored.
        self._before = {number: handler for number in _NUMBERS if (handler := signal.getsignal(number)) in _DEFAULTS}
        signal.set_wakeup_fd(self._outer.fileno(), warn_on_full_buffer=False)
        for number in self._before:
            signal.signal(number, lambda number, frame: None)
        if hasattr(os, "register_at_fork"):
            # A forked child has no such thread, and must not wake its parent's.
            os.register_at_fork(after_in_child=self._give_back)
        threading.Thread(target=self._wait, name="signals", daemon=True).start()

    def _give_back(self) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _wait(self) -> None:
        while (number := self._inner.recv(1)[0]) not in self._before:
            pass
        self.number = number
        threading.Event().wait(self.grace_s)
        sentence = self.describe()
        if sentence:
            _write_to_stderr(sentence)
        os._exit(128 + number)


_watch: _Watch | None = None
_closed: set[int] = set()
"""Standard streams that were closed when the process began."""


def take_over() -> None:
    """Lets SIGINT and SIGTERM end this process as this module says, and opens standard streams that are closed.

    A second call does nothing, and neither does a call from another thread than the main one.
    """
    global _watch
    if _watch is not None or threading.current_thread() is not threading.main_thread():
        return
    # Otherwise the first file that is opened would become the stream and get what is printed.
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The system assigns the lowest free descriptor, which is this one.
            os.open(os.devnull, os.O_RDWR)
            _closed.add(descriptor)
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115
    _watch = _Watch()


def raise_if_stopped() -> None:
    """Raises :class:`Stopped` if a signal has come. Call it where a run can be interrupted, within :func:`leaving`."""
    if _watch is not None and _watch.number:
        raise Stopped(_watch.number)


@contextlib.contextmanager
def leaving(describe: Callable[[], str], *, grace_s: float = GRACE_S) -> Iterator[None]:
    """Gives the block ``grace_s`` seconds after a signal to reach :func:`raise_if_stopped`; then ends the process.

    Args:
      describe: returns the sentence for stderr if the process is ended from outside the block; for ``""`` nothing is printed.
      grace_s: seconds; outside of all blocks a signal ends the process at once.
    """
    if _watch is None:
        yield
        return
    before = _watch.describe, _watch.grace_s
    _watch.describe, _watch.grace_s = describe, grace_s
    try:
        yield
        raise_if_stopped()
    except Stopped:
        # Whoever raised it prints the sentence.
        _watch.describe = str
        raise
    finally:
        if not _watch.number:
            _watch.describe, _watch.grace_s = before


def _write_to_stderr(sentence: str) -> None:
    """Writes without a lock, which the main thread may hold, and without waiting for a pipe that nobody reads."""
    with contextlib.suppress(OSError):
        # The progress bar has hidden the cursor, on a line that it redraws.
        terminal = "\r\x1b[K\x1b[?25h" if os.isatty(2) else ""
        if select.select([], [2], [], 0.5)[1]:
            os.write(2, f"{terminal}{sentence}\n".encode(errors="backslashreplace"))


class Stream:
    """Wraps a standard stream so that writing never fails, and remembers the first problem.

    Output during a run must not end the run. Whether lost output is an error in the end is for the command to decide.
    """

    def __init__(self, stream: Any, descriptor: int) -> None:
        """Takes the stream, and the descriptor that it writes to."""
        self._stream, self._descriptor = stream, descriptor
        self.problem: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        """Returns whatever else the stream has."""
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes the text; after the first failure, or if the stream was closed from the start, discards it."""
        if text and self._descriptor in _closed:
            self.problem = self.problem or OSError(errno.EBADF, os.strerror(errno.EBADF))
        return int(self._guarded(self._stream.write, text) or 0)

    def flush(self) -> None:
        """Writes what is still buffered."""
        self._guarded(self._stream.flush)

    def _guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except OSError as error:
            self.problem = self.problem or error
            # From now on, what the stream still buffers and what libraries print past it goes to /dev/null without an error.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._descriptor)
            os.close(nowhere)
            return len(args[0]) if args else None


def run(command: Callable[[], Any]) -> None:
    """Calls a command and ends the process: with its exit code, with that of a signal, or with 1 if its output was lost."""
    take_over()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A sentence with an escaped character is better than no sentence.
            stream.reconfigure(errors="backslashreplace")
    out, err = sys.stdout, sys.stderr = Stream(sys.stdout, 1), Stream(sys.stderr, 2)
    code: Any = 0
    try:
        command()
    except SystemExit as end:
        code = end.code
    out.flush()
    if out.problem is not None and not code:
        code = 1
        # A pipe that ends early, such as that of head, wants no more output and no message.
        if not isinstance(out.problem, BrokenPipeError):
            err.write(f"gradcomp: cannot write to stdout: {out.problem.strerror}\n")
    err.flush()
    if _watch is not None and _watch.number:
        # Without an orderly shutdown, which sometimes crashes because XLA's threads may still be in a step.
        os._exit(128 + _watch.number)
    sys.stdout, sys.stderr = out._stream, err._stream
    raise SystemExit(code)
