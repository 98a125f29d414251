"""The laboratory's links have the rate and the delay that were asked for, and nothing is left of it."""

import os
import pathlib
import select
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks import lab
from benchmarks.lab import shell

NEEDS = lab.available()
needs_root = pytest.mark.skipif(NEEDS is not None, reason=str(NEEDS))
PEER = str(pathlib.Path(__file__).with_name("peer.py"))


class Pair:
    """Worker 1 sends, worker 0 receives."""

    def __init__(self, net: lab.Network) -> None:
        self.net = net
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._server = net.popen(0, [sys.executable, PEER, "serve"], **pipes)
        assert self._server.stdout.readline() == "ready\n"
        self._client = net.popen(1, [sys.executable, PEER, net.address(0)], **pipes)
        assert self._client.stdout.readline() == "ready\n"

    def start(self, size: int) -> None:
        self._client.stdin.write(f"{size}\n")
        self._client.stdin.flush()

    def arrived(self, within_s: float) -> float | None:
        """Seconds that the message took, or ``None`` if it has not arrived in time."""
        if not select.select([self._client.stdout], [], [], within_s)[0]:
            return None
        return float(self._client.stdout.readline())

    def seconds(self, size: int) -> float:
        self.start(size)
        seconds = self.arrived(within_s=30)
        assert seconds is not None
        return seconds


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with lab.Network(workers=2) as net:
        yield Pair(net)


def ours() -> set[str]:
    return {name for name in shell.namespaces() if name.startswith(f"{shell.PREFIX}-{os.getpid()}-")}


@pytest.mark.network
@needs_root
@pytest.mark.parametrize(("rate", "delay_s"), [(20e6, 0.005)])
def test_rate(pair: Pair, rate: float, delay_s: float) -> None:
    pair.net.shape(rate, delay_s)
    size = round(rate / 8 / 4)
    # The best of some: TCP has to learn the link, and tests its delay now and then.
    fastest = max(8 * size / (pair.seconds(size) - 2 * delay_s) for _ in range(4))
    assert 0.8 * rate < fastest < rate


@pytest.mark.network
@needs_root
def test_delay(pair: Pair) -> None:
    pair.net.shape(None, 0.0)
    assert min(pair.seconds(1) for _ in range(5)) < 0.005
    for delay_s in (0.025, 0.09):
        pair.net.shape(None, delay_s)
        pair.seconds(1)
        # The machine may be busy and can only add to it.
        assert 2 * delay_s < min(pair.seconds(1) for _ in range(5)) < 2 * delay_s + 0.01


@pytest.mark.network
@needs_root
@pytest.mark.parametrize("delay_s", [0.0, 0.005])
def test_sent_bytes_are_the_payload_and_headers(pair: Pair, delay_s: float) -> None:
    pair.net.shape(100e6, delay_s)
    counted = []
    for _ in range(4):
        before = pair.net.sent_bytes(1)
        pair.seconds(1_000_000)
        counted.append(pair.net.sent_bytes(1) - before)
    # The least of some: what is lost on a link is sent again.
    assert 1_000_000 < min(counted) < 1.08 * 1_000_000


@pytest.mark.network
@needs_root
@pytest.mark.parametrize(("worker", "delay_s"), [(1, 0.005)])
def test_cut_and_restore(pair: Pair, worker: int, delay_s: float) -> None:
    pair.net.shape(None, delay_s)
    pair.net.cut(worker)
    try:
        pair.start(1000)
        assert pair.arrived(within_s=0.5) is None
    finally:
        pair.net.restore(worker)
    # TCP tries again on its own, at growing intervals.
    assert pair.arrived(within_s=20) is not None


@pytest.mark.network
@needs_root
def test_nothing_is_left_after_an_error() -> None:
    before = ours()
    with pytest.raises(KeyboardInterrupt), lab.Network(workers=2) as first, lab.Network(workers=2, delay_s=0.001):
        # Two at once, with the same addresses, in each other's way nowhere.
        child = first.popen(0, ["sleep", "60"])
        assert len(ours() - before) == 6
        raise KeyboardInterrupt
    assert child.poll() is not None
    assert ours() == before
    assert not [entry for entry in shell.FILES.glob(f"{shell.PREFIX}-{os.getpid()}-*") if entry.name not in before]


@pytest.mark.network
@needs_root
def test_what_a_killed_run_left_is_removed() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    stale = f"{shell.PREFIX}-{gone.pid}-abc-w0"
    shell.ip("netns", "add", stale)
    with lab.Network(workers=1):
        assert stale not in shell.namespaces()


@pytest.mark.network
@needs_root
def test_only_the_other_workers_can_be_reached() -> None:
    with lab.Network(workers=1) as net:
        child = net.popen(0, ["ip", "route", "show", "table", "main"], stdout=subprocess.PIPE, text=True)
        routes = child.communicate()[0].splitlines()
        assert len(routes) == 1 and routes[0].startswith("10.77.0.0/24")


def test_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda tool: tool)
    assert "sudo" in (lab.available() or "")
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert "apt-get install" in (lab.available() or "")
    with pytest.raises(OSError, match="apt-get install"), lab.Network(workers=1):
        pass


def test_refuses_links_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="workers must be in"):
        lab.Network(workers=0)
    with pytest.raises(ValueError, match="rate must be positive"):
        lab.Network(workers=1).shape(0, 0.0)
