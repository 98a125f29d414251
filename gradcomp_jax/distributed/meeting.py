"""The processes of a run meet over plain sockets, before JAX connects them.

JAX's coordination service believes what every process says of itself. A process with another count, an index that is taken or
the address of another run makes the others wait, aborts, or ends the other run. Here each process says who it is at the
coordinator's address, process 0 compares, and tells all of them the outcome. Then process 0 releases the port, and JAX's
service takes it.
"""

import contextlib
import dataclasses
import json
import selectors
import socket
import sys
import time

from gradcomp_jax._errors import SettingError, numbered
from gradcomp_jax.distributed import address as addresses
from gradcomp_jax.distributed.address import ClusterError

_HELLO = b"gradcomp: who are you?\n"
_MOST_BYTES = 4096
_SILENCE_S = 5.0
"""Seconds until a server that says nothing is taken for another program."""
_TELL_AFTER_S = 10.0
"""Seconds until a process says on stderr which process it waits for."""
_FAREWELL_S = 5.0
_MOST_PROCESSES = 100_000
"""The most processes that are waited for after one has said something wrong, since its count may be any number."""


def meet(coordinator: str, index: int, count: int, *, timeout: float) -> str | None:
    """Waits until all processes are there, and checks that they agree on their count and indices.

    Args:
      coordinator: ``host:port`` of process 0.
      index: of this process.
      count: of all processes.
      timeout: seconds to wait for the others.

    Returns:
      in process 0, the ``host:port`` at which JAX's service is to listen; ``None`` in the others.
    """
    if index > 0:
        _attend(coordinator, index, count, timeout)
        return None
    try:
        server, bound = addresses.listen(coordinator)
    except ClusterError:
        _refuse_second(coordinator, count)
        raise
    with server:
        _Host(server, coordinator, count, timeout).receive()
    return bound


@dataclasses.dataclass(eq=False, slots=True)
class _Guest:
    """Holds a connection to process 0; ``index`` and ``count`` are what the other process says of itself."""

    connection: socket.socket
    peer: str
    heard: bytes = b""
    index: int = -1
    count: int = -1


class _Host:
    """Runs process 0's side: hears which processes come, and tells all of them the outcome."""

    def __init__(self, server: socket.socket, coordinator: str, count: int, timeout: float) -> None:
        self._server = server
        self._coordinator = coordinator
        self._count = count
        self._until = time.monotonic() + timeout
        self._timeout = timeout
        self._guests: list[_Guest] = []

    def receive(self) -> None:
        waiting = _Waiting("0", self._coordinator)
        wrong = ""
        with selectors.DefaultSelector() as selector:
            self._server.setblocking(False)
            selector.register(self._server, selectors.EVENT_READ)
            try:
                while (missing := self._missing()) and time.monotonic() < self._until:
                    if not wrong:
                        waiting.tell(f"waits for {numbered(missing)}")
                    for key, _ in selector.select(0.2):
                        if key.fileobj is self._server:
                            self._welcome(selector)
                        elif (found := self._hear(selector, key.data)) and not wrong:
                            wrong = found
                            # Processes that come a little later are to hear it, too.
                            self._until = min(self._until, time.monotonic() + addresses.SETTLE_S)
                if wrong:
                    self._tell({"wrong": wrong})
                    raise SettingError(wrong)
                if missing:
                    reason = _absent(self._coordinator, missing, self._timeout)
                    self._tell({"late": reason})
                    raise ClusterError(reason)
                self._tell({})
            finally:
                for guest in self._guests:
                    guest.connection.close()

    def _missing(self) -> list[int]:
        count = max([self._count, *(guest.count for guest in self._guests)])
        return sorted(set(range(1, min(count, _MOST_PROCESSES))) - {guest.index for guest in self._guests})

    def _welcome(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, peer = self._server.accept()
            connection.setblocking(False)
            connection.send(_HELLO)
        except OSError:  # The guest is gone already.
            return
        guest = _Guest(connection, str(peer[0]))
        self._guests.append(guest)
        selector.register(connection, selectors.EVENT_READ, guest)

    def _hear(self, selector: selectors.BaseSelector, guest: _Guest) -> str | None:
        """Reads what a guest says; returns what is wrong with it, or ``None``."""
        try:
            said = guest.connection.recv(_MOST_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            said = b""
        guest.heard += said
        line, end, _ = guest.heard.partition(b"\n")
        if said and not end and len(line) < _MOST_BYTES:
            return None
        told = _parsed(line) if end else {}
        index, count = told.get("index"), told.get("count")
        if not said or not isinstance(index, int) or not isinstance(count, int) or not 0 <= index < count:
            # The process has ended, and may come again, or it is another program, such as a port scanner.
            selector.unregister(guest.connection)
            guest.connection.close()
            self._guests.remove(guest)
            return None
        guest.index, guest.count = index, count
        if index == 0:
            return f"two processes say that they are process 0, one of them at {guest.peer}: give each another --process-id"
        if count != self._count:
            return (
                f"the processes do not agree on how many they are: process 0 says {self._count}, and process {index} says "
                f"{count} (from {guest.peer}): give all of them the same --processes"
            )
        for other in self._guests:
            if other is not guest and other.index == index:
                return (
                    f"two processes say that they are process {index}, one at {other.peer}, one at {guest.peer}: give each "
                    "another --process-id"
                )
        return None

    def _tell(self, outcome: dict[str, str]) -> None:
        words = json.dumps(outcome).encode() + b"\n"
        for guest in self._guests:
            try:
                guest.connection.settimeout(_FAREWELL_S)
                guest.connection.sendall(words)
            except OSError:  # The guest will notice that the connection is closed.
                continue


def _attend(coordinator: str, index: int, count: int, timeout: float) -> None:
    """Runs the side of a process other than 0: says who it is, and hears the outcome."""
    host, port = addresses.split(coordinator)
    numeric = addresses.resolve(host)
    start = time.monotonic()
    waiting = _Waiting(str(index), coordinator)
    foreign_since: float | None = None
    while True:
        try:
            return _say(numeric, port, index, count, coordinator, start + timeout + _FAREWELL_S, waiting)
        except _Foreign as error:
            foreign_since = foreign_since or time.monotonic()
            if time.monotonic() > foreign_since + addresses.SETTLE_S:
                raise ClusterError(
                    f"another program or a run that has started already answers at {coordinator}: wait until it has ended, "
                    "or choose another port"
                ) from error
        except OSError as error:
            foreign_since = None
            reason = error.strerror or str(error)
            if time.monotonic() > start + timeout:
                raise ClusterError(f"{_absent(coordinator, [0], timeout)} ({reason})") from error
            waiting.tell(f"waits for process 0 ({reason})")
        time.sleep(0.2)


def _refuse_second(coordinator: str, count: int) -> None:
    """Refuses to be a second process 0 of a run whose process 0 has the port and still waits; both report the error."""
    host, port = addresses.split(coordinator)
    until = time.monotonic() + addresses.SETTLE_S + 2 * _FAREWELL_S
    with contextlib.suppress(_Foreign, ClusterError, OSError):
        _say(addresses.resolve(host), port, 0, count, coordinator, until, _Waiting("0", coordinator))


class _Foreign(Exception):
    """Reports that what answers is not process 0 of a run that is starting."""


def _say(
    numeric: list[str], port: int, index: int, count: int, coordinator: str, until: float, waiting: "_Waiting"
) -> None:
    with _connected(numeric, port) as connection:
        connection.settimeout(_SILENCE_S)
        with connection.makefile("rwb") as stream:
            try:
                hello = stream.readline(len(_HELLO))
            except TimeoutError as error:
                raise _Foreign from error
            if hello != _HELLO:
                raise _Foreign
            stream.write(json.dumps({"index": index, "count": count}).encode() + b"\n")
            stream.flush()
            answer = _answer(connection, until, waiting)
    if time.monotonic() > until:
        raise ClusterError(f"the processes did not come together at {coordinator}, others did not come: start all")
    if answer is None:
        raise ClusterError(
            f"process 0 at {coordinator} ended before all processes were there: see what it says, and start all again"
        )
    if "wrong" in answer:
        raise SettingError(str(answer["wrong"]))
    if "late" in answer:
        raise ClusterError(str(answer["late"]))
    _wait_for_jax(numeric, port)


def _answer(connection: socket.socket, until: float, waiting: "_Waiting") -> dict[str, object] | None:
    """Returns the outcome that process 0 tells; ``None`` if it says nothing."""
    heard = b""
    while time.monotonic() < until:
        connection.settimeout(1.0)
        try:
            said = connection.recv(_MOST_BYTES)
        except TimeoutError:
            waiting.tell("has reached process 0 and waits for others")
            continue
        except OSError:
            return None
        heard += said
        if heard.endswith(b"\n"):
            return _parsed(heard)
        if not said:
            return None
    return None


def _wait_for_jax(numeric: list[str], port: int) -> None:
    """Waits briefly until JAX's service listens, because its client tries again only after a second."""
    until = time.monotonic() + addresses.SETTLE_S
    while time.monotonic() < until:
        try:
            _connected(numeric, port).close()
            return
        except OSError:
            time.sleep(0.05)


def _connected(numeric: list[str], port: int) -> socket.socket:
    problem = OSError("no address")
    for address in numeric:
        try:
            return socket.create_connection((address, port), timeout=_SILENCE_S)
        except OSError as error:
            problem = error
    raise problem


def _parsed(line: bytes) -> dict[str, object]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class _Waiting:
    """Says once on stderr which process is waited for, if that takes long."""

    def __init__(self, index: str, coordinator: str) -> None:
        self._who = f"process {index} at {coordinator}" if index == "0" else f"process {index}"
        self._after: float | None = time.monotonic() + _TELL_AFTER_S

    def tell(self, what: str) -> None:
        if self._after is not None and time.monotonic() > self._after:
            self._after = None
            sys.stderr.write(f"gradcomp_jax: {self._who} {what}\n")
            sys.stderr.flush()


def _absent(coordinator: str, missing: list[int], timeout: float) -> str:
    return (
        f"the processes did not come together at {coordinator}: {numbered(missing)} did not come within {timeout:g} s: start "
        "all of them, and make sure that they reach process 0"
    )
