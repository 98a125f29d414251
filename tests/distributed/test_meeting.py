"""The processes meet over sockets: a mistake of one is one sentence in all of them, and nobody waits for ever."""

import contextlib
import socket
import threading
import time

import pytest

from gradcomp_jax._errors import SettingError
from gradcomp_jax.distributed import ClusterError, address
from gradcomp_jax.distributed.cluster import Place, find_place
from gradcomp_jax.distributed.meeting import meet
from tests.network.processes import free_port


@pytest.fixture(autouse=True)
def _hurried(monkeypatch):
    monkeypatch.setattr(address, "SETTLE_S", 0.5)
    monkeypatch.setattr(address, "NAME_S", 0.5)
    monkeypatch.delenv(address.BIND, raising=False)


def come(*guests: tuple[int, int], timeout: float = 20.0, coordinator: str | None = None) -> list:
    """What :func:`meet` returns or raises for each ``(index, count)``, all at once."""
    coordinator = coordinator or f"127.0.0.1:{free_port()}"
    found: list = [None] * len(guests)

    def one(place: int, index: int, count: int) -> None:
        try:
            found[place] = meet(coordinator, index, count, timeout=timeout)
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=one, args=(i, *guest), daemon=True) for i, guest in enumerate(guests)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return found


def test_those_who_agree_go_on_and_process_0_listens_where_it_was_told_to() -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    assert come((0, 3), (2, 3), (1, 3), coordinator=coordinator) == [coordinator, None, None]


@pytest.mark.parametrize("guests", [((0, 2), (1, 3)), ((0, 3), (1, 2)), ((0, 2), (2, 3)), ((0, 3), (1, 3), (1, 2))])
def test_counts_that_differ_are_named_in_every_process(guests) -> None:
    found = come(*guests)
    assert all(isinstance(error, SettingError) for error in found), found
    assert len({str(error) for error in found}) == 1
    assert f"do not agree on how many they are: process 0 says {guests[0][1]}, and process" in str(found[0])


def test_a_number_that_two_have_is_named_in_every_process() -> None:
    found = come((0, 3), (1, 3), (1, 3))
    assert all(isinstance(error, SettingError) for error in found), found
    assert {str(error) for error in found} == {
        "two processes say that they are process 1, one at 127.0.0.1, one at 127.0.0.1: give each another --process-id"
    }


@pytest.mark.parametrize("others", [(), ((2, 3),)])
def test_two_that_are_process_0_are_told_within_the_time(others) -> None:
    start = time.monotonic()
    found = come((0, 3), (0, 3), *others, timeout=60.0)
    assert time.monotonic() - start < 20
    assert all(isinstance(error, SettingError) for error in found), found
    assert {str(error) for error in found} == {
        "two processes say that they are process 0, one of them at 127.0.0.1: give each another --process-id"
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(("::1:8476", "in brackets, such as [::1]:8476, got"), ("::1", "in brackets, such as [::1]:8476, got")),
        *(("[::1]", "in brackets, such as [::1]:8476, got"), ("fe80::2%eth0:80", "such as [fe80::2%eth0]:80, got")),
        *(
            (text, "must be HOST:PORT, such as 10.0.0.1:8476, got")
            for text in ("http://10.0.0.1:8476", "10.0.0.1", ":8476")
        ),
        *(
            (text, "must be HOST:PORT, such as 10.0.0.1:8476, got")
            for text in ("10.0.0.300:84", "127.1:84", "8476:8476")
        ),
        *(
            (text, "must be HOST:PORT, such as 10.0.0.1:8476, got")
            for text in ("a:0", "a:65536", "a:", "a:1:2", "[a]:1")
        ),
    ],
)
def test_what_is_no_address_is_refused_before_anybody_waits(text: str, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        Place(text, 1, 2)
    assert message in str(caught.value) and str(caught.value).startswith("the coordinator must be HOST:PORT, ")


@pytest.mark.parametrize("text", ["10.0.0.1:8476", "[::1]:8476", "[fe80::2%eth0]:80", "node-1.example_2:1"])
def test_an_address_is_taken_as_it_is(text: str) -> None:
    assert Place(text, 1, 2).coordinator == text


@pytest.mark.parametrize("text", ["1_0", "1e0", "0x1", "\u0661", "1" * 30])
def test_a_number_of_a_process_is_written_in_digits(text: str) -> None:
    with pytest.raises(SettingError, match="JAX_PROCESS_ID must be a whole number, got"):
        find_place("a:1", None, 2, environment={"JAX_PROCESS_ID": text})


def test_where_process_0_shall_listen_is_an_address_too(monkeypatch) -> None:
    monkeypatch.setenv(address.BIND, "::1:8476")
    with pytest.raises(SettingError, match=r"JAX_COORDINATOR_BIND_ADDRESS must be HOST:PORT, .* \[::1\]:8476, got"):
        address.listen("127.0.0.1:8476")


def test_who_does_not_come_is_named() -> None:
    start = time.monotonic()
    found = come((0, 4), (2, 4), timeout=1.0)
    assert time.monotonic() - start < 15
    assert all(isinstance(error, ClusterError) for error in found), found
    assert "processes 1 and 3 did not come within 1 s" in str(found[0])
    (alone,) = come((1, 2), timeout=0.5)
    assert isinstance(alone, ClusterError)
    assert "process 0 did not come within 0.5 s" in str(alone) and "Connection refused" in str(alone)


@pytest.mark.parametrize("greeting", [b"\x00\x00\x12\x04\x00\x00\x00\x00\x00", b"", b"SSH-2.0-x\r\n"])
def test_an_address_that_another_run_or_program_has_is_left_alone(greeting: bytes) -> None:
    """A run that has started would take a newcomer for its own lost process, and end."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = []

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = taken.accept()
                    with connection:
                        connection.sendall(greeting)
                        connection.settimeout(0.05)
                        with contextlib.suppress(TimeoutError):
                            said.append(connection.recv(100))

        threading.Thread(target=answer, daemon=True).start()
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        first, second = come((0, 2), (1, 2), coordinator=at)
    assert isinstance(second, ClusterError) and f"a run that has started already answers at {at}" in str(second)
    assert isinstance(first, ClusterError) and "process 0 cannot listen at port" in str(first)
    assert not any(said), said


def test_a_process_that_ends_may_come_again_and_other_programs_are_not_heard() -> None:
    port = free_port()
    host = threading.Thread(target=lambda: found.append(meet(f"127.0.0.1:{port}", 0, 2, timeout=20)), daemon=True)
    found: list = []
    host.start()
    until = time.monotonic() + 10
    for words in (b'{"index": 1, "count": 2', b"GET / HTTP/1.1\r\n\r\n", b'{"index": [], "count": {}}\n', b"x" * 5000):
        while True:
            try:
                stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
                break
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.02)
        with stranger:
            assert stranger.recv(100).startswith(b"gradcomp")
            # One that is refused may find the connection closed.
            with contextlib.suppress(OSError):
                stranger.sendall(words)
        assert not found
    meet(f"127.0.0.1:{port}", 1, 2, timeout=20)
    host.join(10)
    assert found == [f"127.0.0.1:{port}"]


def test_a_host_that_nobody_knows_is_a_sentence_within_the_time(monkeypatch) -> None:
    found = come((0, 2), (1, 2), coordinator="nowhere.invalid:8476")
    assert all(isinstance(error, SettingError) for error in found)
    assert "the coordinator's host 'nowhere.invalid' is not known here" in str(found[1])
    # A name server that does not answer holds the call for minutes.
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [] if answered.wait(60) else None)
    start = time.monotonic()
    with pytest.raises(SettingError, match="resolver does not answer"):
        address.resolve("slow.example")
    assert time.monotonic() - start < 10
    answered.set()


def test_process_0_listens_at_the_address_alone(monkeypatch, capfd) -> None:
    port = free_port()
    server, bound = address.listen(f"127.0.0.1:{port}")
    with server:
        assert server.getsockname()[0] == "127.0.0.1" and bound == f"127.0.0.1:{port}"
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), timeout=1)
    with pytest.raises(
        SettingError, match=r"192\.0\.2\.1 is not one of this machine: start process 0 there, or set JAX"
    ):
        address.listen(f"192.0.2.1:{port}")
    monkeypatch.setenv(address.BIND, f"0.0.0.0:{port}")
    server, bound = address.listen(f"192.0.2.1:{port}")
    with server:
        assert bound == f"0.0.0.0:{port}"
        socket.create_connection(("127.0.0.2", port), timeout=5).close()
    assert capfd.readouterr().err == ""


def test_a_name_that_leads_to_this_machine_alone_is_told(monkeypatch, capfd) -> None:
    """As in Debian's /etc/hosts: the other machines know another address, at which they must be heard."""
    monkeypatch.setattr(address, "resolve", lambda host: ["127.0.1.1"])
    server, bound = address.listen(f"node1:{free_port()}")
    server.close()
    assert bound.startswith("[::]:")
    assert "node1 is 127.0.1.1 on this machine, so process 0 listens on all its addresses" in capfd.readouterr().err
    assert not address.is_only_here("localhost", ["127.0.0.1"])
    assert not address.is_only_here("127.0.0.1", ["127.0.0.1"])
    assert not address.is_only_here("node1", ["127.0.1.1", "10.0.0.1"])


@pytest.mark.parametrize("text", ["10.0.0.1:80", "[::1]:8476", "node1:1"])
def test_an_address_is_split_and_joined(text: str) -> None:
    assert address.joined(*address.split(text)) == text
