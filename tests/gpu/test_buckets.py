"""Buckets in the schedule of the real XLA:GPU compiler: collectives start while the backward pass goes on."""

from typing import Any

import pytest

import gradcomp_jax as gc
from benchmarks import gpu_programs as gpu
from benchmarks.compiled.programs import DATA, INNER, OUTER
from tests.compiled_schedule import BUCKET, LAYERS, schedule
from tests.gpu.programs import ONE_NODE, SEVERAL, needs_compiler
from tests.marks import slow_but

pytestmark = needs_compiler


def hierarchical(method):
    return gc.hierarchical(method, axis_name=OUTER, inner_axis_name=INNER)


CASES = {
    "block_quantized": (lambda: gc.block_quantized(axis_name=DATA), ONE_NODE, "all-to-all", LAYERS - 1),
    "dense": (lambda: gc.dense(axis_name=DATA), ONE_NODE, "all-reduce", LAYERS - 1),
    "dgc": (lambda: gc.dgc(axis_name=DATA, collective="two_phase"), ONE_NODE, "all-to-all", LAYERS - 1),
    # Of a node's dense half; of the exchange between nodes about half is early.
    "hierarchical dgc": (
        lambda: hierarchical(gc.dgc(axis_name=OUTER, collective="two_phase")),
        SEVERAL,
        "reduce-scatter",
        LAYERS - 1,
    ),
}
QUICK = "block_quantized"
SCHEDULER = "latency-hiding-scheduler"
FLAGS: dict[str, dict[str, Any]] = {
    "default": {},
    "flag": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "flag off": {"xla_gpu_enable_latency_hiding_scheduler": False},
}


@pytest.mark.parametrize("case", slow_but((QUICK,), CASES))
def test_collectives_start_before_the_backward_pass_ends(case: str) -> None:
    """By default: no flag is set."""
    make, topology, kind, least = CASES[case]
    starts, backward = schedule(gc.bucketed(make(), bucket_bytes=BUCKET), gpu.TOPOLOGIES[topology])
    found = [n for n, name in starts if name == kind]
    assert len([n for n in found if n < max(backward)]) >= least, starts
    assert len(found) >= LAYERS, "the compiler has combined buckets"


@pytest.mark.slow
@pytest.mark.parametrize("flags", FLAGS)
def test_the_flag_changes_nothing(flags: str) -> None:
    """The scheduler runs whatever the flag says: the page on overlap says so."""
    make, topology, _, least = CASES[QUICK]
    starts, backward = schedule(gc.bucketed(make(), bucket_bytes=BUCKET), gpu.TOPOLOGIES[topology], FLAGS[flags])
    assert len([n for n, name in starts if name == "all-to-all" and n < max(backward)]) >= least


@pytest.mark.slow
def test_it_is_the_scheduler_that_starts_them_early() -> None:
    make, topology, _, _ = CASES[QUICK]
    tx = gc.bucketed(make(), bucket_bytes=BUCKET)
    starts, backward = schedule(tx, gpu.TOPOLOGIES[topology], {"xla_disable_hlo_passes": SCHEDULER})
    assert len([n for n, _ in starts if n < max(backward)]) <= 1


@pytest.mark.slow
def test_without_buckets_they_start_after_it() -> None:
    make, topology, kind, _ = CASES[QUICK]
    starts, backward = schedule(make(), gpu.TOPOLOGIES[topology])
    assert min(n for n, name in starts if name == kind) > max(backward)
