"""Seconds and bytes of an exchange among all workers, or between the nodes only."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gradcomp_jax.planning import costs
from gradcomp_jax.planning.calibrate import Calibration
from gradcomp_jax.planning.links import Cluster, Link
from gradcomp_jax.planning.traffic import CollectiveTraffic, Traffic, read_method
from gradcomp_jax.planning.workload import Workload

TrafficOf = Callable[[str, Sequence[tuple[int, ...]], int], Traffic]


class Communication(NamedTuple):
    """Holds the fields of a :class:`gradcomp_jax.planning.Prediction` that depend on the layout."""

    inner: float
    outer: float
    sent: float
    state: float


def flat(
    workload: Workload, cluster: Cluster, method: str, calibration: Calibration | None, traffic: TrafficOf
) -> Communication:
    """Returns the cost of one exchange of all workers, where the devices of a node share its outer link."""
    found = traffic(method, workload.shapes, cluster.workers)
    if calibration is not None:
        return Communication(0.0, measured(calibration, found.collectives), found.sent, found.state)
    if cluster.nodes == 1 and cluster.inner is not None:
        return Communication(
            _modelled(found.collectives, cluster.workers, cluster.inner, cluster), 0.0, 0.0, found.state
        )
    leaving = [c._replace(sent=c.sent * _leaving(c.kind, cluster)) for c in found.collectives]
    outer = _modelled(leaving, cluster.workers, cluster.outer, cluster)
    if cluster.inner is not None:
        # Rings and pairs use links of both kinds, and wait for the slower one.
        outer = max(outer, _modelled(found.collectives, cluster.workers, cluster.inner, cluster))
    return Communication(0.0, outer, sum(c.sent for c in leaving), found.state)


def all_reduced(method: str, shapes: Sequence[tuple[int, ...]], workers: int) -> Traffic:
    """Returns a method's traffic as one all-reduce, which has fewer messages than two phases; dense bfloat16 sends as much."""
    found = read_method(method, tuple(shapes), workers)
    sent = sum(c.sent for c in found.collectives)
    return dataclasses.replace(found, collectives=(CollectiveTraffic("all-reduce", 1, sent),) if sent else ())


def hierarchical(
    workload: Workload, cluster: Cluster, method: str, calibration: Calibration | None, traffic: TrafficOf
) -> Communication:
    """Returns the cost of the method between nodes, a shard for each device, and of the dense exchange within nodes."""
    assert cluster.inner is not None
    found = traffic(method, _shards(workload.shapes, cluster.per_node), cluster.nodes)
    # The devices of a node exchange their shards at the same time, over the same link.
    leaving = [c._replace(sent=c.sent * cluster.per_node) for c in found.collectives]
    inner = costs.hierarchical(1, cluster.per_node, 4 * workload.values, cluster.inner, 0.0)
    if calibration is not None:
        outer = measured(calibration, found.collectives)
    else:
        outer = _modelled(leaving, cluster.nodes, cluster.outer, cluster)
    return Communication(inner, outer, sum(c.sent for c in leaving), found.state)


@functools.lru_cache(maxsize=64)
def _shards(shapes: tuple[tuple[int, ...], ...], parts: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shape of a device's part of each tensor: rows of the matrix of its last dimension against all others."""
    return tuple(
        (math.ceil(math.prod(shape[:-1]) / parts), shape[-1])
        if len(shape) > 1
        else (math.ceil(math.prod(shape) / parts),)
        for shape in shapes
    )


def _leaving(kind: str, cluster: Cluster) -> float:
    """Returns the bytes on a node's link for each byte that one of its devices sends.

    A ring passes through every node once, whatever the node's size: one byte. In an all-to-all every device of a node sends
    over the node's link, to all devices that are not in the node.
    """
    if kind not in ("all-to-all", "reduce-scatter"):
        return 1.0
    return cluster.per_node * (cluster.workers - cluster.per_node) / (cluster.workers - 1)


def _modelled(collectives: Sequence[CollectiveTraffic], workers: int, link: Link, cluster: Cluster) -> float:
    ring = cluster.topology == "ring"
    return sum(
        c.launches * costs.collective(c.kind, workers, c.sent / c.launches, link, ring=ring)
        for c in collectives
        if c.launches
    )


def measured(calibration: Calibration, collectives: Sequence[CollectiveTraffic]) -> float:
    """Returns the seconds of collectives in sequence, by a calibration."""
    return sum(c.launches * calibration.seconds(c.kind, c.sent / c.launches) for c in collectives if c.launches)
