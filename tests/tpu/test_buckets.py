"""Buckets in the schedule of the real TPU compiler: collectives start while the backward pass goes on."""

import pytest

import gradcomp_jax as gc
from benchmarks import tpu_programs as tpu
from benchmarks.compiled.programs import DATA, INNER, OUTER
from tests.compiled_schedule import BUCKET, LAYERS, schedule
from tests.tpu.programs import ONE_SLICE, SLICED, needs_compiler

pytestmark = needs_compiler


def hierarchical(method):
    return gc.hierarchical(method, axis_name=OUTER, inner_axis_name=INNER)


# Within a slice an all-to-all is no asynchronous instruction: it is for the compiler to say what it puts where.
CASES = {
    "block_quantized": (lambda: gc.block_quantized(axis_name=DATA), ONE_SLICE[0], "all-to-all", 1),
    "dense": (lambda: gc.dense(axis_name=DATA), ONE_SLICE[0], "all-reduce", LAYERS // 2),
    "hierarchical dgc": (
        lambda: hierarchical(gc.dgc(axis_name=OUTER, collective="two_phase")),
        SLICED,
        "send",
        LAYERS // 2,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_collectives_start_before_the_backward_pass_ends(case: str) -> None:
    make, topology, kind, least = CASES[case]
    starts, backward = schedule(gc.bucketed(make(), bucket_bytes=BUCKET), tpu.TOPOLOGIES[topology])
    found = [n for n, name in starts if name == kind]
    assert len([n for n in found if n < max(backward)]) >= least, starts
    assert len(found) >= LAYERS, "the compiler has combined buckets"


def test_without_buckets_they_start_after_it() -> None:
    make, topology, kind, _ = CASES["block_quantized"]
    starts, backward = schedule(make(), tpu.TOPOLOGIES[topology])
    assert min(n for n, name in starts if name == kind) > max(backward)
