"""Speed-ups that papers claim, worked out again with the planner."""

import dataclasses
from collections.abc import Callable

from gradcomp_jax._markdown import table
from gradcomp_jax.planning import Device, Link, Workload, alexnet, predict
from gradcomp_jax.planning.links import Cluster
from gradcomp_jax.planning.traffic import CollectiveTraffic, Traffic

MIB = 2**20
# Of AlexNet: what the DGC paper says that a node sends, and the dense gradient, 232.56 MiB.
DGC_PAYLOAD = 0.39 * MIB
VALUES = Workload.of(alexnet(), 0.0).values
ETHERNET_LATENCY = 50e-6


@dataclasses.dataclass(frozen=True)
class Claim:
    """A speed-up as a paper has it, and ours for a step of so many seconds on one node.

    Attributes:
        text: what is claimed.
        published: the speed-up; "over" and "about" are in the text.
        ours: seconds of a node's step without the network -> speed-up.
    """

    text: str
    published: float
    ours: Callable[[float], float]


def _dense(nodes: int, gbit: float) -> Callable[[float], float]:
    return lambda node: _step(
        node, nodes, gbit, [CollectiveTraffic("all-reduce", 1, 2 * (nodes - 1) / nodes * 4 * VALUES)]
    )


def _dgc(nodes: int, gbit: float) -> Callable[[float], float]:
    """The paper gathers the payloads of all nodes."""
    return lambda node: _step(node, nodes, gbit, [CollectiveTraffic("all-gather", 1, (nodes - 1) * DGC_PAYLOAD)])


def _terngrad(nodes: int, gbit: float, workers: int) -> Callable[[float], float]:
    """2 bits a value on the uplink; on the downlink the sum of ternary values on a shared scale, of 2N + 1 levels."""
    shard = (nodes - 1) / nodes * VALUES / 8
    downlink = (2 * workers).bit_length()
    collectives = [CollectiveTraffic("all-to-all", 1, 2 * shard), CollectiveTraffic("all-gather", 1, downlink * shard)]
    return lambda node: _step(node, nodes, gbit, collectives)


def _step(node: float, nodes: int, gbit: float, collectives: list[CollectiveTraffic]) -> float:
    """Seconds of a step of all nodes; what happens within a node is in ``node``."""
    workload = Workload.of(alexnet(), node)
    cluster = Cluster(nodes, Link.of_bits(gbit * 1e9, ETHERNET_LATENCY))
    none = Device(copies={"dense": 0.0})
    traffic = Traffic(tuple(collectives), 0)
    found = predict(workload, cluster, "dense", device=none, traffic=lambda *_: traffic, prices={})
    return found.step


def _speed_up(nodes: int, step: Callable[[float], float]) -> Callable[[float], float]:
    return lambda node: nodes * node / step(node)


CLAIMS = (
    Claim("DGC paper: 64 nodes, dense, 10 Gbit/s: about 30x one node", 30, _speed_up(64, _dense(64, 10))),
    Claim("DGC paper: 64 nodes, DGC, 1 Gbit/s: over 40x one node", 40, _speed_up(64, _dgc(64, 1))),
    Claim(
        "TernGrad paper: 8 GPUs in 2 nodes, 1 Gbit/s: TernGrad 3.04x as fast as float",
        3.04,
        lambda node: _dense(2, 1)(node) / _terngrad(2, 1, 8)(node),
    ),
)


def solve(claim: Claim) -> float:
    """Seconds of a node's step at which the planner has just the published speed-up."""
    low, high = 1e-4, 1e2
    rises = claim.ours(high) > claim.ours(low)
    for _ in range(80):
        middle = (low * high) ** 0.5
        if (claim.ours(middle) < claim.published) == rises:
            low = middle
        else:
            high = middle
    return low


def claims_table() -> list[str]:
    """Each claim with steps of a node between which its batch and its cards can be."""
    steps = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7)
    head = ("claim", *(f"{1e3 * s:.0f} ms" for s in steps), "step that gives the claim")
    rows = ((c.text, *(f"{c.ours(s):.1f}x" for s in steps), f"{1e3 * solve(c):.0f} ms") for c in CLAIMS)
    return table(head, rows, align="lr")
