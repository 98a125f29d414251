"""Costs of collectives, against a walk through their messages."""

import math

import pytest

from gradcomp_jax.planning import MODELS, Cluster, Link, costs

LINK = Link(rate=1e6, latency=0.01)
COUNTS = (1, 2, 3, 4, 7, 8, 64)
each_count = pytest.mark.parametrize("n", COUNTS)


def walk(messages) -> float:
    """Seconds of rounds one after the other, in each of which every worker sends one message of so many bytes."""
    return math.fsum(LINK.latency + size / LINK.rate for size in messages)


@each_count
def test_rings(n: int) -> None:
    """N - 1 rounds of a shard each way."""
    shard = [1000 / n] * (n - 1)
    assert costs.ring_reduce_scatter(n, 1000, LINK) == pytest.approx(walk(shard))
    assert costs.all_to_all(n, 1000, LINK) == pytest.approx(walk(shard))
    assert costs.ring_all_gather(n, 1000 / n, LINK) == pytest.approx(walk(shard))
    assert costs.ring_all_reduce(n, 1000, LINK) == pytest.approx(walk(shard * 2))


@each_count
def test_logarithms(n: int) -> None:
    """Doubling sends all in each round; Bruck's gather what has come so far; halving and doubling half, a quarter, ..."""
    assert costs.doubling_all_reduce(n, 1000, LINK) == pytest.approx(walk([1000] * math.ceil(math.log2(n))))
    gathered, have = [], 1
    while have < n:
        gathered.append(100 * min(have, n - have))
        have *= 2
    assert costs.bruck_all_gather(n, 100, LINK) == pytest.approx(walk(gathered))
    if n & (n - 1) == 0:
        halves = [1000 / 2 ** (r + 1) for r in range(n.bit_length() - 1)]
        assert costs.rabenseifner_all_reduce(n, 1000, LINK) == pytest.approx(walk(halves * 2))


@each_count
def test_two_phases_are_their_collectives(n: int) -> None:
    want = costs.all_to_all(n, 400, LINK) + costs.bruck_all_gather(n, 800 / n, LINK)
    assert costs.two_phase(n, 400, 800, LINK) == pytest.approx(want)
    # By bytes the two phases of one payload are an all-reduce of it.
    late = Link(1e6, 0.0)
    assert costs.two_phase(n, 500, 500, late) == pytest.approx(costs.ring_all_reduce(n, 500, late))


def test_within_nodes_and_between_them() -> None:
    inner = Link(1e9, 1e-6)
    within = costs.ring_all_reduce(8, 1000, inner)
    assert costs.hierarchical(4, 8, 1000, inner, 0.5) == pytest.approx(within + 0.5)
    assert costs.hierarchical(1, 8, 1000, inner, 0.5) == pytest.approx(within)


def test_links_and_clusters_are_checked() -> None:
    assert Link.of_bits(8e9, 0.001) == Link(1e9, 0.001)
    with pytest.raises(ValueError, match="rate must be above 0"):
        Link(0, 0.1)
    with pytest.raises(ValueError, match="latency must be finite and at least 0"):
        Link(1e9, -1.0)
    assert Cluster(64, LINK, 8, LINK).nodes == 8
    with pytest.raises(ValueError, match="60 workers do not fill nodes of 8: take 56 or 64"):
        Cluster(60, LINK, 8, LINK)
    with pytest.raises(ValueError, match="need inner="):
        Cluster(64, LINK, 8)
    with pytest.raises(ValueError, match="topology must be one of"):
        Cluster(4, LINK, topology="star")


@pytest.mark.parametrize(
    ("name", "leaves", "values", "mib"),
    [
        ("alexnet", 16, 60_965_224, 232.56),
        ("vgg16", 32, 138_357_544, None),
        ("lstm-ptb", 10, 51_034_000, 194.68),
        ("resnet50", 161, 25_557_032, 97.49),
        ("llama-8b", 291, 8_030_261_248, None),
    ],
)
def test_models_are_those_of_the_papers(name: str, leaves: int, values: int, mib: float | None) -> None:
    """Parameters as their authors count them, and bytes as the DGC paper does."""
    shapes = MODELS[name]()
    found = sum(math.prod(leaf.shape) for leaf in shapes.values())
    assert (len(shapes), found) == (leaves, values)
    if mib is not None:
        assert round(4 * found / 2**20, 2) == mib
