"""Clusters by name, with the figures that their makers publish, not measured ones."""

import dataclasses
from collections.abc import Mapping

from gradcomp_jax.planning.links import Cluster, Link

_LATENCY, _INNER_LATENCY = 50e-6, 5e-6
"""Seconds one way, between nodes and within a node. They are assumed, because nobody publishes them."""


@dataclasses.dataclass(frozen=True)
class Preset:
    """Describes a cluster and its devices.

    Attributes:
        cluster: eight nodes of GPUs, or the TPU slices that the name gives. A slice is a node here: ``outer`` is all of its
            hosts' network cards together.
        memory: bytes of a device.
        memory_rate: bytes a second that a device reads and writes.
    """

    cluster: Cluster
    memory: float
    memory_rate: float


def _of(nodes: int, per_node: int, outer_bits: float, inner: float, memory: float, memory_rate: float) -> Preset:
    outer = Link.of_bits(outer_bits, _LATENCY)
    return Preset(Cluster(nodes * per_node, outer, per_node, Link(inner, _INNER_LATENCY)), memory, memory_rate)


_H100 = {"inner": 450e9, "memory": 80e9, "memory_rate": 3.35e12}
_A100 = {"inner": 300e9, "memory": 80e9, "memory_rate": 2.039e12}
_V5E = {"inner": 200e9, "memory": 16e9, "memory_rate": 819e9}
_V5E_CHIP_BITS = 6.4e12 / 256
"""Bits a second of the data centre's network, for each chip."""

CLUSTERS: Mapping[str, Preset] = {
    "h100x8-100G": _of(8, 8, 100e9, **_H100),
    "h100x8-3200G": _of(8, 8, 3200e9, **_H100),
    "a100x8-100G": _of(8, 8, 100e9, **_A100),
    "v5e-16x4": _of(4, 16, 16 * _V5E_CHIP_BITS, **_V5E),
    "v5e-256x2": _of(2, 256, 256 * _V5E_CHIP_BITS, **_V5E),
}
"""The presets by name; ``docs/planner.md`` says where each figure comes from."""
