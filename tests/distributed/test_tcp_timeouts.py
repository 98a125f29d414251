"""Which sockets get a longer time limit, and which are left alone."""

import socket

import pytest

from gradcomp_jax.distributed.tcp_timeouts import keep_connections

if not hasattr(socket, "TCP_USER_TIMEOUT"):
    pytest.skip("TCP_USER_TIMEOUT is Linux's", allow_module_level=True)


def limit(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


@pytest.mark.parametrize(("before_ms", "after_ms"), [(0, 0), (20_000, 60_000), (60_000, 60_000), (90_000, 90_000)])
def test_a_limit_is_only_ever_raised(before_ms: int, after_ms: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, before_ms)
        assert keep_connections(60) == (before_ms != after_ms)
        assert limit(client) == after_ms
        assert limit(server) == 0


def test_an_accepted_connection_that_python_never_saw_still_works() -> None:
    """gRPC's are not Python's: the socket is found by its descriptor, which stays open."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)
        descriptor = accepted.detach()
        assert keep_connections(60) == 1
        client.sendall(b"still here")
        with socket.socket(fileno=descriptor) as again:
            assert again.recv(10) == b"still here"
            assert limit(again) == 60_000


def test_files_pipes_and_other_sockets_are_passed_over(tmp_path) -> None:
    one, other = socket.socketpair()
    with one, other, socket.socket(socket.AF_INET, socket.SOCK_DGRAM), (tmp_path / "file").open("w") as file:
        assert keep_connections(60) == 0
        file.write("open")
        one.sendall(b"open")
        assert other.recv(4) == b"open"
