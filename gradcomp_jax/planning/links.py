"""Links between the workers: their rate and latency, and how many devices share each."""

import dataclasses
import math
from typing import Literal, get_args

from gradcomp_jax import _checks

Topology = Literal["ring", "switch"]


@dataclasses.dataclass(frozen=True)
class Link:
    """Describes one direction of a full-duplex link.

    Attributes:
        rate: bytes per second, above 0; infinity for a link that costs latency alone.
        latency: seconds from one end to the other, at least 0.
    """

    rate: float
    latency: float

    def __post_init__(self) -> None:
        """Refuses values that no link can have."""
        _checks.number_of("bytes per second", "rate", self.rate)
        _checks.number_of("seconds", "latency", self.latency)
        if not self.rate > 0:
            raise ValueError(f"rate must be above 0 bytes per second, got {self.rate}")
        if not (self.latency >= 0 and math.isfinite(self.latency)):
            raise ValueError(f"latency must be finite and at least 0 seconds, got {self.latency}")

    @classmethod
    def of_bits(cls, bits_per_second: float, latency: float) -> "Link":
        """Returns a link whose rate is in bits per second, as networks are sold."""
        return cls(bits_per_second / 8, latency)

    def seconds(self, size: float) -> float:
        """Returns the time of one message of ``size`` bytes, from the first bit sent to the last one received."""
        return self.latency + size / self.rate


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Describes the workers, their nodes, and the links between them.

    Attributes:
        workers: devices in all.
        outer: the link of each node, or of each device if a node has one device.
        per_node: devices of a node.
        inner: the link of each device within its node; needed if a node has several devices.
        topology: ``switch``: any two nodes communicate at full rate, and collectives may take a logarithm of rounds. ``ring``:
            only neighbours communicate.
    """

    workers: int
    outer: Link
    per_node: int = 1
    inner: Link | None = None
    topology: Topology = "switch"

    def __post_init__(self) -> None:
        """Refuses values that do not fit together."""
        for name, link in (("outer", self.outer), ("inner", self.inner or self.outer)):
            if not isinstance(link, Link):
                raise TypeError(f"{name} must be a link, such as gradcomp_jax.Link.of_bits(10e9, 50e-6), got {link!r}")
        _checks.positive_int("workers", self.workers)
        _checks.positive_int("per_node", self.per_node)
        _checks.one_of("topology", self.topology, get_args(Topology))
        if self.workers % self.per_node:
            below = self.workers // self.per_node * self.per_node
            take = " or ".join(str(n) for n in (below, below + self.per_node) if n)
            raise ValueError(f"{self.workers} workers do not fill nodes of {self.per_node}: take {take}")
        if self.per_node > 1 and self.inner is None:
            raise ValueError(f"nodes of {self.per_node} devices need inner=, the link within a node")

    @property
    def nodes(self) -> int:
        """Returns the number of nodes."""
        return self.workers // self.per_node
