"""Buckets in the schedule of the real TPU compiler: collectives start while the backward pass goes on."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import gradcomp_jax as gc
from benchmarks import tpu_programs as tpu
from tests.tpu.programs import ONE_SLICE, SLICED, needs_compiler

pytestmark = needs_compiler

LAYERS, WIDTH = 8, 1024
STARTS = r" = .*\s(all-to-all|all-gather|all-reduce|reduce-scatter|send)(-start)?\("


def loss(params, x):
    for name in sorted(params):
        x = jax.nn.relu(x @ params[name]["kernel"] + params[name]["bias"])
    return jnp.mean(x**2)


def schedule(tx, topology: str) -> tuple[list[tuple[int, str]], list[int]]:
    """Where collectives start and where matrix products of the backward pass are, in the order of the compiled program."""
    where = tpu.TOPOLOGIES[topology]
    layer = {
        "bias": jax.ShapeDtypeStruct((WIDTH,), jnp.float32),
        "kernel": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
    }
    params = {f"layer_{i}": layer for i in range(LAYERS)}
    mesh = where.mesh()
    batch = jax.ShapeDtypeStruct((64 * mesh.size, WIDTH), jnp.float32)
    axis = where.axes if where.slices > 1 else where.axes[0]
    tx = optax.chain(tx, optax.sgd(0.1))
    text = tpu.trace_step(loss, params, batch, tx, mesh, axis_name=axis).lower().compile().as_text()
    assert "is_scheduled=true" in text
    entry = text[text.index("ENTRY") :].splitlines()
    starts = [(n, m[1]) for n, line in enumerate(entry) if (m := re.search(STARTS, line))]
    backward = [n for n, line in enumerate(entry) if re.search(r'op_name="[^"]*transpose\(jvp[^"]*dot_general', line)]
    assert len(backward) >= LAYERS
    return starts, backward


def hierarchical(method):
    return gc.hierarchical(method, axis_name=tpu.SLICES, inner_axis_name=tpu.CHIPS)


BUCKET = 4 * WIDTH * WIDTH
# Within a slice an all-to-all is no asynchronous instruction: it is for the compiler to say what it puts where.
CASES = {
    "block_quantized": (lambda: gc.block_quantized(axis_name=tpu.DATA), ONE_SLICE[0], "all-to-all", 1),
    "dense": (lambda: gc.dense(axis_name=tpu.DATA), ONE_SLICE[0], "all-reduce", LAYERS // 2),
    "hierarchical dgc": (
        lambda: hierarchical(gc.dgc(axis_name=tpu.SLICES, collective="two_phase")),
        SLICED,
        "send",
        LAYERS // 2,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_collectives_start_before_the_backward_pass_ends(case: str) -> None:
    make, topology, kind, least = CASES[case]
    starts, backward = schedule(gc.bucketed(make(), bucket_bytes=BUCKET), topology)
    found = [n for n, name in starts if name == kind]
    assert len([n for n in found if n < max(backward)]) >= least, starts
    assert len(found) >= LAYERS, "the compiler has combined buckets"


def test_without_buckets_they_start_after_it() -> None:
    make, topology, kind, _ = CASES["block_quantized"]
    starts, backward = schedule(make(), topology)
    assert min(n for n, name in starts if name == kind) > max(backward)
