"""The library beside peers' published algorithms, which `benchmarks/published` has in NumPy: 24 steps of four workers each.

What the library's own forms keep, and that nothing is lost, are tests/conformance's laws; here are the peers' forms, so that a
difference to a peer is known, and stays what it is.
"""

import numpy as np
import pytest

import gradcomp_jax as gc
from benchmarks import peers
from benchmarks.published import beside, frequencies, low_rank, momentum_correction, streaming
from benchmarks.published.comparisons import COMPARISONS, first_q, signs_apart
from tests.programs import compiled

QUICK = ("DeepSpeed's 1-bit Adam", "frozen"), ("DGC's authors", "rounded alike"), ("DeMo's authors", "")


def marked(comparison: beside.Comparison):
    quick = any(comparison.peer == peer and what in comparison.what for peer, what in QUICK)
    return pytest.param(
        comparison,
        marks=() if quick else pytest.mark.slow,
        id=f"{comparison.peer}: {comparison.what}".replace(" ", "-"),
    )


@pytest.mark.parametrize("comparison", [marked(c) for c in COMPARISONS])
def test_the_peer_computes_the_same(comparison: beside.Comparison) -> None:
    """Up to what rounding can do to the peer's algorithm."""
    bound = comparison.bound()
    assert 0 < bound <= beside.MOST
    assert comparison.distance() <= bound


@pytest.mark.slow
def test_an_approximate_selection_is_not_the_authors_of_demo() -> None:
    """On smooth gradients: the largest frequencies of a chunk are neighbours. And so the comparison can fail."""
    assert signs_apart(exact=False) > 0.02


@pytest.mark.slow
@pytest.mark.parametrize("sides", [(12, 16), (64, 64)], ids=str)
def test_exact_takes_the_largest_frequencies_of_each_chunk(sides: tuple[int, int]) -> None:
    """Whatever lies beside whatever: as sorting all of them finds, where the default misses some."""
    block, k, rng = sides[0] * sides[1], 16, np.random.default_rng(0)
    falling = 1 / np.add.outer(1 + np.arange(sides[0]), 1 + np.arange(sides[1])).reshape(-1) ** 2
    frequencies_of = (falling * rng.standard_normal((6, block))).reshape(6, *sides)
    left, right = map(frequencies.cosines, sides)
    rows = (left.T @ frequencies_of @ right).reshape(6, block).astype(np.float32)
    want = np.sort(np.argsort(-np.abs((left @ rows.reshape(6, *sides) @ right.T).reshape(6, block)), axis=1)[:, :k])
    found = {}
    for exact in (False, True):
        code = gc.compressors.in_frequency(gc.compressors.topk(k / block, block=block, exact=exact))
        payload, _ = compiled(code.encode)(rows, (), gc.compressors.RowInfo(np.full(6, block, np.int32)))
        found[exact] = np.sort(np.asarray(payload.index))
    np.testing.assert_array_equal(found[True], want)
    assert (found[False] != want).any()


@pytest.mark.slow
def test_fragments_depart_and_arrive_as_maxtexts_and_after_torchfts() -> None:
    """A delayed mean of torchft departs ``delay`` steps before the fragment's part of the period is over."""
    turns = streaming.turns()
    departures, arrivals = turns["ours"]
    assert len(departures) == 2 * len(streaming.FRAGMENTS)
    assert turns["MaxText, numbered as ours"] == (departures, arrivals)
    assert turns["torchft"][1] == departures
    assert [(step + streaming.SHOWN, number) for step, number in turns["torchft"][0]] == departures


@pytest.mark.slow
def test_dion_of_a_wide_kernel_is_the_authors_of_its_transpose() -> None:
    """Their code has orthonormal columns on the longer side, ours on the side of the fan-in."""
    wide, tall = {"w": (10, 24)}, {"w": (24, 10)}
    theirs = low_rank.Dion(wide, beside.WORKERS, first_q(wide, 0, 2), momentum=0.9)
    turned = low_rank.Dion(tall, beside.WORKERS, first_q(wide, 0, 2), momentum=0.9, side="in")
    plain = low_rank.Dion(wide, beside.WORKERS, first_q(wide, 1, 2), momentum=0.9, side="in")
    apart = []
    for _, gradients in zip(range(beside.STEPS), beside.gaussian(wide, 5), strict=False):
        want = theirs.step(gradients)["w"]
        # The factor of a fan-in of 24 and a fan-out of 10, in the place of the other.
        again = 24 / 10 * turned.step({"w": gradients["w"].swapaxes(1, 2)})["w"].T
        np.testing.assert_allclose(again, want, rtol=1e-9, atol=1e-9)
        apart.append(np.abs(plain.step(gradients)["w"] - want).max() / np.abs(want).max())
    assert max(apart) > 0.05


@pytest.mark.slow
def test_dgc_rounds_a_density_to_the_nearest_and_its_authors_up() -> None:
    for size, theirs, ours in ((101, 6, 5), (330, 17, 16), (180, 9, 9), (7, 1, 1)):
        peer = momentum_correction.Dgc({"w": (size, 1)}, beside.WORKERS, ratio=0.05, momentum=0.9)
        assert (peer.k["w"], gc.compressors.topk(0.05, block=size).k) == (theirs, ours)


@pytest.mark.benchmarks
@pytest.mark.slow
def test_the_command_prints_all_comparisons(capsys) -> None:
    assert peers.main() == 0
    printed = capsys.readouterr().out
    for comparison in COMPARISONS:
        assert comparison.what in printed
    assert "with exact=True 0.0%" in printed
