"""TCP time limits that let connections outlast a network outage for as long as the heartbeats do."""

import os
import pathlib
import socket
import stat

_DESCRIPTORS = pathlib.Path("/proc/self/fd")


def keep_connections(seconds: int) -> int:
    """Raises the time limits of this process's TCP connections, if they have any, to ``seconds``.

    gRPC's servers drop a connection whose data is not acknowledged for 20 s (``TCP_USER_TIMEOUT``, Linux), and JAX has no
    setting for it. A client of the coordination service that loses its connection ends its process. A network outage during a
    barrier would therefore end a run, although the heartbeats would wait longer. A connection without a limit, or with a longer
    one, is left unchanged.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is None or not _DESCRIPTORS.is_dir():
        return 0
    raised = 0
    for name in os.listdir(_DESCRIPTORS):
        try:
            descriptor = os.dup(int(name))
        except OSError:  # The socket was closed after it was listed.
            continue
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            continue
        with socket.socket(fileno=descriptor) as connection:
            internet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if not internet or connection.type != socket.SOCK_STREAM:
                continue
            if 0 < connection.getsockopt(socket.IPPROTO_TCP, option) < 1000 * seconds:
                connection.setsockopt(socket.IPPROTO_TCP, option, 1000 * seconds)
                raised += 1
    return raised
