r"""What a collective takes, by the latency-bandwidth model: :math:`\alpha` seconds a message, :math:`m / B` for its bytes.

Every function takes ``workers`` :math:`N`, ``size`` :math:`m` in bytes and a :class:`~gradcomp_jax.planning.links.Link` with
latency :math:`\alpha` and rate :math:`B`, and returns seconds. One worker needs no message: 0. Links are full duplex, and all
workers send at once.

References:
    Thakur, Rabenseifner and Gropp, 2005, Optimization of Collective Communication Operations in MPICH, sections 3 and 4; Wen et
    al., 2017, https://arxiv.org/abs/1705.07878, section 5.3 (the model for gradients); Renggli et al., 2019,
    https://arxiv.org/abs/1802.08021, section 5.3 (sparse sums).
"""

from gradcomp_jax.planning.links import Link


def rounds(workers: int) -> int:
    """Returns the logarithm of the workers to base 2, rounded up."""
    return (workers - 1).bit_length()


def ring_all_reduce(workers: int, size: float, link: Link) -> float:
    r"""Returns :math:`2 (N - 1) \alpha + 2 \frac{N - 1}{N} \frac mB`: reduce-scatter and all-gather among neighbours."""
    return 2 * (workers - 1) * link.latency + 2 * (workers - 1) / workers * size / link.rate


def doubling_all_reduce(workers: int, size: float, link: Link) -> float:
    r"""Returns :math:`\lceil \log_2 N \rceil (\alpha + \frac mB)`: everything in each round; for short messages."""
    return rounds(workers) * link.seconds(size)


def rabenseifner_all_reduce(workers: int, size: float, link: Link) -> float:
    r"""Returns :math:`2 \lceil \log_2 N \rceil \alpha + 2 \frac{N - 1}{N} \frac mB`: halving, then doubling."""
    return 2 * rounds(workers) * link.latency + 2 * (workers - 1) / workers * size / link.rate


def ring_all_gather(workers: int, size: float, link: Link) -> float:
    r"""Returns :math:`(N - 1) (\alpha + \frac mB)`; ``size`` is one worker's payload."""
    return (workers - 1) * link.seconds(size)


def bruck_all_gather(workers: int, size: float, link: Link) -> float:
    r"""Returns :math:`\lceil \log_2 N \rceil \alpha + (N - 1) \frac mB`; ``size`` is one worker's payload."""
    return rounds(workers) * link.latency + (workers - 1) * size / link.rate


def ring_reduce_scatter(workers: int, size: float, link: Link) -> float:
    r"""Returns :math:`(N - 1) \alpha + \frac{N - 1}{N} \frac mB`; ``size`` is what each worker has."""
    return (workers - 1) * link.latency + (workers - 1) / workers * size / link.rate


def all_to_all(workers: int, size: float, link: Link) -> float:
    r"""Returns :math:`(N - 1) \alpha + \frac{N - 1}{N} \frac mB`: ``size`` is what each worker has for all workers together."""
    return ring_reduce_scatter(workers, size, link)


def two_phase(workers: int, uplink: float, downlink: float, link: Link) -> float:
    """Returns the seconds of an all-to-all of ``uplink`` bytes and an all-gather of ``downlink`` bytes."""
    gathered = bruck_all_gather(workers, downlink / workers, link)
    return all_to_all(workers, uplink, link) + gathered


def hierarchical(nodes: int, per_node: int, size: float, inner: Link, outer_seconds: float) -> float:
    """Returns the seconds of a dense reduce-scatter and all-gather within nodes, and of the exchange between them.

    Of ``size`` bytes of dense gradient, ``size / per_node`` are exchanged between nodes in ``outer_seconds``, if there are
    several nodes.
    """
    within = ring_reduce_scatter(per_node, size, inner) + ring_all_gather(per_node, size / per_node, inner)
    return within + (outer_seconds if nodes > 1 else 0.0)


def collective(kind: str, workers: int, sent: float, link: Link, *, ring: bool = False) -> float:
    """Returns the seconds of the fastest algorithm here for a collective in which a device sends ``sent`` bytes.

    Args:
        kind: as :func:`gradcomp_jax.wire_bytes` names it.
        workers: N.
        sent: bytes that one device sends under the bandwidth-optimal algorithm.
        link: the link of each worker.
        ring: whether only neighbours communicate.

    Raises:
        ValueError: for a kind without a formula.
    """
    if workers == 1 or sent == 0:
        return 0.0
    n = workers - 1
    if kind == "all-reduce":
        size = sent * workers / (2 * n)
        algorithms = [ring_all_reduce] if ring else [ring_all_reduce, rabenseifner_all_reduce, doubling_all_reduce]
        return min(seconds(workers, size, link) for seconds in algorithms)
    if kind == "all-gather":
        gather = ring_all_gather if ring else bruck_all_gather
        return gather(workers, sent / n, link)
    if kind in ("reduce-scatter", "all-to-all"):
        return ring_reduce_scatter(workers, sent * workers / n, link)
    if kind == "collective-permute":
        return link.seconds(sent)
    raise ValueError(
        f"no formula for {kind!r}: there are all-reduce, all-gather, reduce-scatter, all-to-all and collective-permute"
    )
