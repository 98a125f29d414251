"""The process of the command: what SIGINT and SIGTERM do, and standard streams that are closed or full.

Only the standard library is imported, so that all of it stands before JAX is imported.
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
"""Seconds that a run has to come to the end of its step, and of a save."""

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class Stopped(KeyboardInterrupt):
    """A signal asks the command to end. Raised by :func:`raise_if_stopped` alone, and never in the midst of a step."""

    def __init__(self, number: int) -> None:
        """Takes the number of the signal."""
        super().__init__(number)
        self.code = 128 + number


class _Watch:
    """A thread that waits for the first signal and ends the process.

    Python calls a handler in the main thread, between two bytecodes: one that raises has to wait for a compilation, its
    exception is lost in a callback, and what it leaves half done crashes the interpreter's shutdown now and then. The file
    descriptor that :func:`signal.set_wakeup_fd` names is written to at once, so a thread that reads it is in time.
    """

    def __init__(self) -> None:
        self._inner, self._outer = socket.socketpair()
        self._outer.setblocking(False)
        self.number = 0
        self.describe: Callable[[], str] = lambda: "gradcomp: stopped"
        self.grace_s = 0.0
        # A shell starts what runs in the background with SIGINT ignored, and so it stays.
        self._before = {number: handler for number in _NUMBERS if (handler := signal.getsignal(number)) in _DEFAULTS}
        signal.set_wakeup_fd(self._outer.fileno(), warn_on_full_buffer=False)
        for number in self._before:
            signal.signal(number, lambda number, frame: None)
        if hasattr(os, "register_at_fork"):
            # A child has no such thread, and must not wake its parent's.
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

    A second call does nothing, and neither does one from another thread than the main one.
    """
    global _watch
    if _watch is not None or threading.current_thread() is not threading.main_thread():
        return
    # Otherwise the first file that is opened would be the stream, and get what is printed.
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest one that is free is given out, which is this one.
            os.open(os.devnull, os.O_RDWR)
            _closed.add(descriptor)
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115
    _watch = _Watch()


def raise_if_stopped() -> None:
    """Raises :class:`Stopped` if a signal has come. Call it where a run can be left, within :func:`leaving`."""
    if _watch is not None and _watch.number:
        raise Stopped(_watch.number)


@contextlib.contextmanager
def leaving(describe: Callable[[], str], *, grace_s: float = GRACE_S) -> Iterator[None]:
    """Gives the block ``grace_s`` seconds after a signal to come to :func:`raise_if_stopped`; then the process ends.

    Args:
      describe: returns the sentence for stderr, where the process is ended from without the block; nothing for ``""``.
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
        # Who raised it says so.
        _watch.describe = str
        raise
    finally:
        if not _watch.number:
            _watch.describe, _watch.grace_s = before


def _write_to_stderr(sentence: str) -> None:
    """Writes without a lock, which the main thread may hold, and without waiting for a pipe that nobody reads."""
    with contextlib.suppress(OSError):
        # The bar has hidden the cursor, in a line that it draws again and again.
        terminal = "\r\x1b[K\x1b[?25h" if os.isatty(2) else ""
        if select.select([], [2], [], 0.5)[1]:
            os.write(2, f"{terminal}{sentence}\n".encode(errors="backslashreplace"))


class Stream:
    """A standard stream that goes on when nothing more can be written to it, and remembers why.

    What is printed on the way must not end a run; what is printed in the end is the command's to judge.
    """

    def __init__(self, stream: Any, descriptor: int) -> None:
        """Takes the stream, and the descriptor that it writes to."""
        self._stream, self._descriptor = stream, descriptor
        self.problem: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        """Returns whatever else the stream has."""
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes, to nowhere after the first failure or where the stream was closed from the start."""
        if text and self._descriptor in _closed:
            self.problem = self.problem or OSError(errno.EBADF, os.strerror(errno.EBADF))
        return int(self._guarded(self._stream.write, text) or 0)

    def flush(self) -> None:
        """Writes what is kept back."""
        self._guarded(self._stream.flush)

    def _guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except OSError as error:
            self.problem = self.problem or error
            # Also what the stream still keeps, and what libraries print past it, can be written from now on.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._descriptor)
            os.close(nowhere)
            return len(args[0]) if args else None


def run(command: Callable[[], Any]) -> None:
    """Calls a command and ends the process: with its exit code, with that of a signal, or with 1 where its output was lost.

    Raises:
      SystemExit: with the exit code, where no signal came.
    """
    take_over()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A sentence with a sign that the terminal does not know is better than none.
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
        # A pipe that ends early, such as that of head, wants no more and no word.
        if not isinstance(out.problem, BrokenPipeError):
            err.write(f"gradcomp: cannot write to stdout: {out.problem.strerror}\n")
    err.flush()
    if _watch is not None and _watch.number:
        # No orderly shutdown: XLA's threads may be in the midst of a step, and it crashes now and then.
        os._exit(128 + _watch.number)
    sys.stdout, sys.stderr = out._stream, err._stream
    raise SystemExit(code)
