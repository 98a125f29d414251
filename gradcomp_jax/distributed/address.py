"""The coordinator's address: what a name resolves to, and where process 0 listens for it."""

import errno
import ipaddress
import os
import re
import socket
import sys
import threading
import time

from gradcomp_jax._errors import SettingError

BIND = "JAX_COORDINATOR_BIND_ADDRESS"
EVERYWHERE = "[::]"
_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)

NAME_S = 15.0
"""Seconds until a name that cannot be resolved is given up as unknown."""

SETTLE_S = 10.0
"""Seconds that an earlier run has to release the port, if all processes are restarted at once."""


class ClusterError(RuntimeError):
    """Reports that the processes could not be brought together."""


def check(name: str, address: str) -> None:
    """Refuses an address that is not ``host:port``, before it is looked up."""
    host, _, port = address.rpartition(":")
    fits = re.fullmatch(r"\d{1,5}", port, re.ASCII) and 0 < int(port) < 65536
    for bare, its_port in ((host, port if fits else "8476"), (address.strip("[]"), "8476")):
        if ":" in bare and _is_ip(bare):
            raise SettingError(
                f"{name} must be HOST:PORT, with an IPv6 address in brackets, such as [{bare}]:{its_port}, got {address!r}"
            )
    if host.startswith("["):
        known = host.endswith("]") and ":" in host and _is_ip(host[1:-1])
    elif re.fullmatch(r"(0x[0-9a-f]*|\d+)(\.(0x[0-9a-f]*|\d+))*", host, re.ASCII | re.IGNORECASE):
        # Systems read 8476 and 10.1 as IPv4 addresses with parts left out, and nobody means these.
        known = _is_ip(host)
    else:
        known = re.fullmatch(r"[^\s/:@\[\]]+", host) is not None
    if not known or not fits:
        raise SettingError(f"{name} must be HOST:PORT, such as 10.0.0.1:8476, got {address!r}")


def _is_ip(text: str) -> bool:
    bare, scoped, scope = text.partition("%")
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        return False
    return not scoped or re.fullmatch(r"[\w.-]+", scope) is not None


def split(address: str) -> tuple[str, int]:
    """Returns the host and the port of ``host:port``; an IPv6 address loses its brackets."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def joined(host: str, port: int) -> str:
    """Returns ``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def resolve(host: str, *, within_s: float | None = None) -> list[str]:
    """Returns the numeric addresses of a host, IPv4 or IPv6, in the order of the system."""
    within_s = NAME_S if within_s is None else within_s
    until = time.monotonic() + within_s
    found: list[str] = []
    reason = "the system's resolver does not answer"

    def ask() -> None:
        nonlocal reason
        try:
            answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found.extend(dict.fromkeys(str(address[0]) for *_, address in answers))
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)

    # A name server that is down can block the call for minutes, and a new machine's name may appear a little late.
    while not found and time.monotonic() < until:
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(max(0.0, until - time.monotonic()))
        if not found:
            time.sleep(min(0.5, max(0.0, until - time.monotonic())))
    if not found:
        raise SettingError(f"the coordinator's host {host!r} is not known here: {reason}; name it by its IP address")
    return found


def is_only_here(host: str, addresses: list[str]) -> bool:
    """Returns whether a machine's name resolves to loopback addresses only, as in Debian's ``/etc/hosts``.

    Other machines resolve the name to another address.
    """
    if host == "localhost" or host in addresses:
        return False
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def listen(coordinator: str) -> tuple[socket.socket, str]:
    """Listens for process 0: at the coordinator's address only, or where ``JAX_COORDINATOR_BIND_ADDRESS`` says.

    Returns:
      the socket, and its ``host:port`` for JAX, which listens there later.
    """
    asked = os.environ.get(BIND)
    if asked and not re.fullmatch(r":\d{1,5}", asked):
        check(BIND, asked)
    host, port = split(asked or coordinator)
    if asked and host in ("", "::", "0.0.0.0"):
        return _listen(host or "::", port), joined(host or EVERYWHERE, port)
    addresses = resolve(host)
    if is_only_here(host, addresses):
        sys.stderr.write(
            f"gradcomp_jax: {host} is {addresses[0]} on this machine, so process 0 listens on all its addresses: give the "
            "address that the others reach\n"
        )
        return _listen("::", port), joined(EVERYWHERE, port)
    for address in addresses:
        try:
            return _listen(address, port), joined(address, port)
        except OSError as error:
            # The addresses are tried in turn: a name may have addresses of both families.
            if error.errno not in _NOT_OURS:
                raise
    raise SettingError(
        f"process 0 listens at the coordinator's address, and {addresses[-1]} is not one of this machine: start process 0 "
        f"there, or set {BIND}=0.0.0.0:{port} if another machine translates the address"
    )


def _listen(host: str, port: int) -> socket.socket:
    everywhere = host == "::" and socket.has_dualstack_ipv6()
    host = "" if host == "::" and not everywhere else host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    until = time.monotonic() + SETTLE_S
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=512, dualstack_ipv6=everywhere)
        except OSError as error:
            if error.errno in _NOT_OURS:
                raise
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise ClusterError(
                    f"process 0 cannot listen at port {port}: {error.strerror}; choose another port"
                ) from error
            time.sleep(0.2)
