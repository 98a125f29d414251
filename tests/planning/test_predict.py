"""Predictions against arithmetic by hand, and what must hold of any of them: of seconds, so without prices in steps."""

import math

import hypothesis
import pytest
from hypothesis import strategies as st

import gradcomp_jax as gc
from gradcomp_jax.cli.plan_figures import to_dict
from gradcomp_jax.methods import METHODS
from gradcomp_jax.planning import MODELS, Device, Workload, break_even, costs, predict, should_compress, speed_up
from gradcomp_jax.planning.outlook import outlook

LINK = gc.Link.of_bits(1e9, 50e-6)
INNER = gc.Link(100e9, 5e-6)
SHAPES = ((1024, 1024),) * 20
WORK = Workload(0.1, SHAPES)
VALUES = 20 * 2**20
NO_TIME = Device(copies=dict.fromkeys(METHODS, 0.0))
SLOW = Device(20e9, {**dict.fromkeys(METHODS, 3.0), "dense": 1.0, "dense_bf16": 1.5})


def test_dense_is_an_all_reduce() -> None:
    found = predict(WORK, gc.Cluster(16, LINK), "dense", device=NO_TIME)
    assert found.outer == pytest.approx(costs.rabenseifner_all_reduce(16, 4 * VALUES, LINK), rel=1e-4)
    assert found.step == found.compute + found.exposed == 0.1 + found.outer
    ring = predict(WORK, gc.Cluster(16, LINK, topology="ring"), "dense", device=NO_TIME)
    assert ring.outer == pytest.approx(costs.ring_all_reduce(16, 4 * VALUES, LINK), rel=1e-4)


def test_two_phases() -> None:
    """8 bits a value and an eighth of one for scales, on the uplink and on the downlink."""
    found = predict(WORK, gc.Cluster(16, LINK), "block_quantized", device=NO_TIME)
    assert found.sent == pytest.approx(2 * 15 / 16 * VALUES * 65 / 64, rel=0.01)
    assert found.outer == pytest.approx(found.sent / LINK.rate + (15 + 4) * LINK.latency, rel=1e-4)


def test_overlap_hides_communication_and_never_compression() -> None:
    slow = Device(copy_rate=1e9)
    for overlap in (0.0, 0.5, 1.0):
        work = Workload(0.4, SHAPES, overlap)
        found = predict(work, gc.Cluster(4, LINK), "dgc", device=slow)
        assert found.exposed == pytest.approx(max(0.0, found.outer - overlap * 0.4))
        assert found.step >= 0.4 + found.compress > 0.4


def test_nodes_send_once_what_their_devices_share() -> None:
    """Hierarchical, dense: each of 8 devices all-reduces an eighth; all eighths go over the one link."""
    cluster = gc.Cluster(64, LINK, 8, INNER)
    found = predict(WORK, cluster, "dense", device=NO_TIME, layout="hierarchical")
    assert found.sent == pytest.approx(2 * 7 / 8 * 4 * VALUES, rel=1e-3)
    assert found.inner == pytest.approx(costs.ring_all_reduce(8, 4 * VALUES, INNER), rel=1e-6)
    flat = predict(WORK, cluster, "block_quantized", device=NO_TIME, layout="flat")
    tall = predict(WORK, cluster, "block_quantized", device=NO_TIME, layout="hierarchical")
    assert flat.sent > 4 * tall.sent
    assert predict(WORK, cluster, "block_quantized", device=NO_TIME) == min(flat, tall, key=lambda p: p.step)


def test_one_node_uses_its_inner_link() -> None:
    found = predict(WORK, gc.Cluster(8, LINK, 8, INNER), "dense", layout="flat", device=NO_TIME)
    assert found.outer == 0 == found.sent
    assert found.inner == pytest.approx(costs.rabenseifner_all_reduce(8, 4 * VALUES, INNER), rel=1e-3)


def test_do_not_compress_where_the_link_is_fast() -> None:
    fast = gc.Cluster(4, gc.Link(50e9, 5e-6))
    verdict = should_compress(WORK, fast, device=SLOW, prices={})
    assert not verdict.compress and verdict.method.startswith("dense")
    verdict = should_compress(WORK, gc.Cluster(4, gc.Link.of_bits(1e8, 5e-6)), device=SLOW, prices={})
    assert verdict.compress and verdict.gain > 5
    assert list(verdict.ranking) == sorted(verdict.ranking, key=lambda p: p.step)


def test_a_difference_that_a_plan_cannot_tell_is_a_tie() -> None:
    """Where dense goes over into compressed, the rates are in order: compress, a tie on both sides of equal, do not."""
    even = break_even(WORK, gc.Cluster(4, LINK), "dgc", device=SLOW, prices={})

    def verdict(rate: float):
        return should_compress(
            WORK, gc.Cluster(4, gc.Link(rate, LINK.latency)), methods=["dgc"], device=SLOW, prices={}
        )

    seen = [verdict(even * factor) for factor in (0.3, 0.98, 1.02, 10.0)]
    assert [v.compress for v in seen] == [True, False, False, False]
    assert [v.tie for v in seen] == [False, True, True, False]
    assert all(v.method.startswith("dense") for v in seen[1:])


@pytest.mark.parametrize("method", ["terngrad", "dgc", "powersgd", "block_quantized"])
def test_break_even_is_where_both_are_as_fast(method: str) -> None:
    rate = break_even(WORK, gc.Cluster(8, LINK), method, device=SLOW, prices={})
    assert 0 < rate < math.inf

    def gain(at: float) -> float:
        cluster = gc.Cluster(8, gc.Link(at, LINK.latency))
        own, *dense = (predict(WORK, cluster, n, device=SLOW).step for n in (method, "dense", "dense_bf16"))
        return min(dense) / own

    assert gain(0.9 * rate) > 1 > gain(1.1 * rate)


def test_a_method_may_never_pay_or_always() -> None:
    assert break_even(WORK, gc.Cluster(8, LINK), "stochastic_rounding", device=SLOW, prices={}) == 0
    # Without arithmetic and latency, fewer bytes are always faster.
    assert break_even(WORK, gc.Cluster(8, gc.Link(1e9, 0.0)), "sign_sgd", device=NO_TIME, prices={}) == math.inf


@hypothesis.given(
    method=st.sampled_from(sorted(METHODS)),
    workers=st.sampled_from([1, 2, 4, 16, 64, 100]),
    gbit=st.floats(0.01, 400),
    compute=st.floats(1e-4, 10),
)
def test_laws(method: str, workers: int, gbit: float, compute: float) -> None:
    """A step is never shorter than its computation, a faster link never slower, and speed-up never above the workers."""
    work = Workload(compute, ((512, 512), (512,)))
    found = predict(work, gc.Cluster(workers, gc.Link.of_bits(gbit * 1e9, 1e-5)), method)
    faster = predict(work, gc.Cluster(workers, gc.Link.of_bits(2e9 * gbit, 1e-5)), method)
    assert found.step >= compute and faster.step <= found.step
    assert 0 < speed_up(found, workers) <= workers * (1 + 1e-9)
    if workers == 1:
        assert found.step == compute and found.sent == 0


def test_dense_bfloat16_has_the_better_of_its_collectives() -> None:
    """Where latency counts one all-reduce has fewer messages than two phases; a calibrated link has what was measured."""
    work = Workload(0.1, ((1024, 1024),) * 8)
    for latency, better in ((0.0, "all-to-all"), (5e-3, "all-reduce")):
        cluster = gc.Cluster(64, gc.Link(1.25e9, latency))
        found = predict(work, cluster, "dense_bf16", device=NO_TIME)
        assert found.outer == pytest.approx(
            min(found.outer, costs.rabenseifner_all_reduce(64, 2 * work.values, cluster.outer)), rel=1e-3
        )
        phases = costs.two_phase(64, 2 * work.values, 2 * work.values, cluster.outer)
        assert (found.outer < 0.5 * phases) == (better == "all-reduce")
        assert found.sent == pytest.approx(predict(work, cluster, "dense", device=NO_TIME).sent / 2, rel=1e-3)


@pytest.mark.slow
def test_an_outlook_has_curves_for_the_papers_figures() -> None:
    found = outlook(Workload.of(MODELS["alexnet"](), 0.2), gc.Cluster(64, LINK, 4, INNER))
    workers, lines = found.by_workers
    assert 64 in workers and workers == tuple(sorted(workers)) and workers[-1] <= 1024
    assert {"dense", "dense_bf16"} < set(lines) and all(len(line) == len(workers) for line in lines.values())
    rates, lines = found.by_rate
    for name, line in lines.items():
        assert list(line) == sorted(line), name
    assert any(rate == pytest.approx(LINK.rate) for rate in rates)
    kept = to_dict(found)
    assert kept["predictions"][0]["step"] == found.verdict.ranking[0].step
    assert all(p["break_even"] in (None, "always", "never") or p["break_even"] > 0 for p in kept["predictions"])


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'terngrad'"):
        predict(WORK, gc.Cluster(4, LINK), "terngard")
    with pytest.raises(ValueError, match="compute must be finite and at least 0 seconds, got -1"):
        Workload(-1, SHAPES)
    with pytest.raises(ValueError, match=r"overlap must be in \[0, 1\]"):
        Workload(1, SHAPES, 2.0)
    with pytest.raises(ValueError, match="the model has no parameters"):
        Workload(1, ())
    with pytest.raises(ValueError, match="copy_rate must be above 0"):
        Device(0.0)
    for wrong in (lambda: Workload("180ms", SHAPES), lambda: gc.Link("10Gbit", 0.0), lambda: gc.Link(1e9, "50us")):
        with pytest.raises(TypeError, match=r"must be a number of (seconds|bytes per second), got '"):
            wrong()
    with pytest.raises(TypeError, match=r"outer must be a link, such as gradcomp_jax.Link.of_bits\(.*got 1000000000.0"):
        gc.Cluster(4, 1e9)
    with pytest.raises(TypeError, match="inner must be a link"):
        gc.Cluster(4, LINK, 2, "200GB/s")
    with pytest.raises(ValueError, match="workers must be at least 2"):
        outlook(WORK, gc.Cluster(1, LINK))
    with pytest.raises(ValueError, match="methods must name one to compare with dense and dense_bf16, got dense"):
        outlook(WORK, gc.Cluster(4, LINK), methods=["dense"])
    with pytest.raises(ValueError, match="no formula for 'send'"):
        costs.collective("send", 4, 10.0, LINK)
