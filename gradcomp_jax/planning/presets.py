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
        platform: whose figures count, of :data:`gradcomp_jax.planning.PLATFORMS`.
    """

    cluster: Cluster
    memory: float
    platform: str


def _of(nodes: int, per_node: int, outer_bits: float, inner: float, memory: float, platform: str) -> Preset:
    outer = Link.of_bits(outer_bits, _LATENCY)
    return Preset(Cluster(nodes * per_node, outer, per_node, Link(inner, _INNER_LATENCY)), memory, platform)


_H100 = (450e9, 80e9, "h100")
_A100 = (300e9, 80e9, "a100")
_V5E = (200e9, 16e9, "v5e")
_V5E_CHIP_BITS = 6.4e12 / 256
"""Bits a second of the data centre's network, for each chip."""

CLUSTERS: Mapping[str, Preset] = {
    "h100x8-100G": _of(8, 8, 100e9, *_H100),
    "h100x8-3200G": _of(8, 8, 3200e9, *_H100),
    "a100x8-100G": _of(8, 8, 100e9, *_A100),
    "v5e-16x4": _of(4, 16, 16 * _V5E_CHIP_BITS, *_V5E),
    "v5e-256x2": _of(2, 256, 256 * _V5E_CHIP_BITS, *_V5E),
}
"""The presets by name; ``docs/planner.md`` says where each figure comes from."""
