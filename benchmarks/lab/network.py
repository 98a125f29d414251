"""Workers in network namespaces, and the links between them."""

import itertools
import json
import os
import secrets
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

from . import requirements, shell
from .shell import ip, run
from .switch import Switch

_WIRE, _TUN = "wire", "tun"
_SETTINGS = {
    # Long links need large windows, and a pause between two steps must not end what TCP knows about a link: what a site
    # that trains over such links would set. Both favour large messages, the dense ones.
    "net.ipv4.tcp_rmem": "4096 131072 67108864",
    "net.ipv4.tcp_wmem": "4096 65536 67108864",
    "net.ipv4.tcp_slow_start_after_idle": "0",
    # What TCP knew about a link does not hold after it has changed.
    "net.ipv4.tcp_no_metrics_save": "1",
}
_ports = itertools.count(20000)


class Network:
    """Namespaces with an address each, joined by links of one rate and one delay.

    Without a delay the links are pairs of virtual Ethernets on a bridge, shaped by ``tc tbf``; with one they are tun
    devices, and a program passes the packets on (:mod:`.switch`). A worker's address is the same either way, and open
    connections outlive a change, and with them what TCP has found: the most that a link could hold before it lost a segment. Go
    from links that hold more to links that hold less, or start new processes.

    The rate holds for each direction of each worker's link. A message between two workers is in flight for ``delay_s``.

    Args:
        workers: 1 to 64.
        rate: bits per second, or ``None`` for what the machine can do.
        delay_s: seconds, one way.

    Raises:
        OSError: if this machine does not allow it, see :func:`~benchmarks.lab.available`; if a command fails.
    """

    def __init__(self, workers: int, *, rate: float | None = None, delay_s: float = 0.0) -> None:
        if not 1 <= workers <= 64:
            raise ValueError(f"workers must be in [1, 64], got {workers}")
        self.workers = workers
        self._links = (rate, delay_s)
        self._run = f"{shell.PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"
        self._made: list[str] = []
        self._children: list[subprocess.Popen] = []
        self._switch: Switch | None = None
        self._cut: set[int] = set()
        self.coordinator = f"{self.address(0)}:{next(_ports)}"
        """Where worker 0 listens, for ``jax.distributed.initialize``."""

    def __enter__(self) -> "Network":
        reason = requirements.available()
        if reason is not None:
            raise OSError(reason)
        shell.remove_stale()
        try:
            self._build()
            self.shape(*self._links)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills what runs in the namespaces and removes them."""
        for child in self._children:
            if child.poll() is None:
                child.kill()
        for child in self._children:
            child.wait()
        if self._switch is not None:
            self._switch.close()
            self._switch = None
        for name in reversed(self._made):
            shell.remove(name)
        self._made.clear()

    def address(self, worker: int) -> str:
        return f"10.77.0.{worker + 1}"

    def popen(self, worker: int, argv: Sequence[str], **options: Any) -> subprocess.Popen:
        """Starts a process in the namespace of a worker; ``options`` are those of ``subprocess.Popen``."""
        # ip becomes the program, so signals to the child reach it.
        child = subprocess.Popen(["ip", "netns", "exec", self._name(worker), *argv], **options)
        self._children.append(child)
        return child

    def shape(self, rate: float | None, delay_s: float) -> None:
        """Changes all links, also under open connections.

        Args:
            rate: bits per second, or ``None``.
            delay_s: seconds, one way.
        """
        if (rate is not None and rate <= 0) or delay_s < 0:
            raise ValueError(f"rate must be positive or None and delay_s not negative, got {rate}, {delay_s}")
        if delay_s:
            if self._switch is None:
                self._switch = self._start_switch()
            for worker in range(self.workers):
                self._switch.shape(worker, rate, delay_s)
        else:
            for worker in range(self.workers):
                _limit(self._name(worker), _WIRE, rate)
                _limit(self._bridge, f"port{worker}", rate)
        self._links = (rate, delay_s)
        for worker in range(self.workers):
            self._route(worker)

    def shape_worker(self, worker: int, rate: float | None, delay_s: float) -> None:
        """Changes one worker's link where links have a delay. A message is in flight for half of each end's delay.

        Args:
            worker: its number.
            rate: bits per second, or ``None``.
            delay_s: seconds. Where the other end has none, half of it passes one way, and all of it there and back.
        """
        if self._switch is None:
            raise ValueError("links have no delay yet: give the network one")
        self._name(worker)
        self._switch.shape(worker, rate, delay_s)

    def cut(self, worker: int) -> None:
        """Packets to and from a worker vanish, as when a cable is pulled: no end is told."""
        self._set_link(worker, up=False)

    def restore(self, worker: int) -> None:
        """Undoes :meth:`cut`."""
        self._set_link(worker, up=True)

    def sent_bytes(self, worker: int) -> int:
        """``tx_bytes`` of the worker's interfaces: payload, headers and acknowledgements, since the network was made.

        The kernel counts up to 64 KiB that it hands to an interface at once as one packet with one header.
        """
        links = json.loads(ip("-n", self._name(worker), "-s", "-j", "link", "show"))
        return sum(link["stats64"]["tx"]["bytes"] for link in links if link["ifname"] in (_WIRE, _TUN))

    def resent_segments(self, worker: int) -> int:
        """Segments that the worker's TCP has sent once more, since the network was made."""
        text = ip("netns", "exec", self._name(worker), "cat", "/proc/net/snmp")
        names, values = (line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:"))
        return int(dict(zip(names, values, strict=True))["RetransSegs"])

    @property
    def _bridge(self) -> str:
        return f"{self._run}-bridge"

    def _name(self, worker: int) -> str:
        if not 0 <= worker < self.workers:
            raise ValueError(f"worker must be in [0, {self.workers}), got {worker}")
        return f"{self._run}-w{worker}"

    def _build(self) -> None:
        self._make(self._bridge)
        ip("-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._bridge, "link", "set", "bridge", "up")
        for worker in range(self.workers):
            name, port = self._name(worker), f"port{worker}"
            self._make(name)
            # gloo listens at the address of the host's name.
            hosts = shell.FILES / name / "hosts"
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text(f"127.0.0.1 localhost\n{self.address(worker)} {socket.gethostname()}\n")
            run("ip", "netns", "exec", name, "sysctl", "-qw", *(f"{k}={v}" for k, v in _SETTINGS.items()))
            ip("-n", name, "link", "set", "lo", "up")
            # The address belongs to no link, so that it stays when the link is another one.
            ip("-n", name, "address", "add", f"{self.address(worker)}/32", "dev", "lo")
            ip("link", "add", _WIRE, "netns", name, "type", "veth", "peer", "name", port, "netns", self._bridge)
            ip("-n", self._bridge, "link", "set", port, "master", "bridge", "up")
            ip("-n", name, "link", "set", _WIRE, "up")

    def _make(self, name: str) -> None:
        self._made.append(name)
        ip("netns", "add", name)

    def _start_switch(self) -> Switch:
        switch = Switch(_TUN, [self._name(worker) for worker in range(self.workers)])
        for worker in range(self.workers):
            # Room for what the switch has not read yet: a tun device drops what its queue does not hold.
            ip("-n", self._name(worker), "link", "set", _TUN, "txqueuelen", "20000", "mtu", "1500", "up")
            switch.link(worker, up=worker not in self._cut)
        return switch

    def _route(self, worker: int) -> None:
        device = _TUN if self._links[1] else _WIRE
        name, source = self._name(worker), self.address(worker)
        # The same congestion control on every machine, the one that most use. A namespace may choose it for a route alone.
        ip(
            "-n",
            name,
            "route",
            "replace",
            "10.77.0.0/24",
            "dev",
            device,
            "scope",
            "link",
            "src",
            source,
            "congctl",
            "cubic",
        )

    def _set_link(self, worker: int, *, up: bool) -> None:
        (self._cut.discard if up else self._cut.add)(worker)
        # The far end: the worker's own interface and its routes stay.
        self._name(worker)
        ip("-n", self._bridge, "link", "set", f"port{worker}", "up" if up else "down")
        if self._switch is not None:
            self._switch.link(worker, up=up)


def _limit(namespace: str, device: str, rate: float | None) -> None:
    if rate is None:
        subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], capture_output=True)
        return
    # A millisecond at full speed: with a large bucket a small message would never meet the rate.
    burst = max(16384, round(rate / 8 / 1000))
    limit = ("rate", f"{round(rate)}bit", "burst", str(burst), "latency", "100ms")
    run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *limit)
