"""Replicas on GPU: steps between two exchanges change the state in place and send nothing, and a late one waits for nothing."""

import pytest

import gradcomp_jax as gc
from benchmarks import gpu_programs as gpu
from benchmarks.compiled import model
from benchmarks.compiled.programs import DATA, outer_steps
from gradcomp_jax.audit.hlo import parse_module
from tests.compiled_programs import exchanges_wait

from .programs import needs_compiler

pytestmark = needs_compiler

METHODS = {
    "diloco": (lambda: gc.diloco(gc.dense(axis_name=DATA), axis_name=DATA), 2.1),
    "streaming": (lambda: gc.diloco(gc.dense(axis_name=DATA), axis_name=DATA, parts=4), 1.8),
    "streaming, late": (lambda: gc.diloco(gc.dense(axis_name=DATA), axis_name=DATA, parts=4, delay=5, mix=0.5), 2.0),
    "diloco int8": (lambda: gc.diloco(gc.block_quantized(axis_name=DATA), axis_name=DATA), 2.9),
    "sparse_loco": (lambda: gc.sparse_loco(axis_name=DATA), 5.2),
    "elastic": (lambda: gc.elastic_average(gc.dense(axis_name=DATA), axis_name=DATA, every=4), 2.5),
}
QUICK = "diloco"


@pytest.mark.parametrize("method", [pytest.param(n, marks=[] if n == QUICK else pytest.mark.slow) for n in METHODS])
def test_local_steps_copy_nothing_and_send_nothing(method: str) -> None:
    make, most = METHODS[method]
    compiled = outer_steps(make(), gpu.LARGE)
    gradient = model.gradient_bytes(model.few_leaves())
    assert compiled.memory_analysis().temp_size_in_bytes <= most * gradient
    # The loss, and how many exchanges were skipped.
    assert gc.wire_bytes(compiled, branch=0).sent < 100 < gc.wire_bytes(compiled, branch=1).sent
    entry = parse_module(compiled.as_text()).entry
    copied = [i for i in entry.instructions.values() if i.opcode == "copy" and i.shapes[0].bytes > gradient // 1000]
    # What is on its way, one row of each worker's, goes through two loops: into the one and out of the other.
    assert [i for i in copied if i.shapes[0].dims[0] != 1] == []
    assert not copied or "late" in method


@pytest.mark.slow
@pytest.mark.parametrize("delay", (0, 5))
def test_an_exchange_that_arrives_late_waits_for_nothing_of_its_step(delay: int) -> None:
    assert exchanges_wait(gpu.LARGE, delay) == [delay == 0] * 4
