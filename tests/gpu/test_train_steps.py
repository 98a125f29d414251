"""The train step of every method, compiled by the real XLA:GPU compiler: what it sends is what was predicted, and no more.

Two predictions, neither by the GPU compiler: ``predicted`` is the method alone, lowered for CPU; ``asked`` is the train step as
it was lowered for GPU.
"""

import math

import pytest

import gradcomp_jax as gc
from benchmarks import gpu_programs as gpu
from benchmarks.compiled import model, programs
from benchmarks.compiled.programs import DATA, INNER, OUTER
from tests.compiled_programs import DENSE, LOSS, LOW_RANK, floats, operands, smallest_matrix

from .programs import ONE_NODE, SEVERAL, methods, needs_compiler

pytestmark = needs_compiler

on_one_node = pytest.mark.parametrize(("method", "topology"), methods(ONE_NODE))
on_nodes = pytest.mark.parametrize(("method", "topology"), methods(SEVERAL))
# What an all-reduce of counters and verdicts inside a node may be.
FEW = 64
# Gradients: of the two phases of one_bit_adam each is a branch that copies the state.
MOST_TEMPORARIES = {"one_bit_adam": 4.2}


def train_step(method: str, topology: str) -> programs.Program:
    """On several nodes as ``hierarchical``: each GPU's shard between them."""
    where = gpu.TOPOLOGIES[topology]
    return programs.train_step(method, where, hierarchical=where.parts > 1)


@on_one_node
def test_one_node_sends_what_was_asked_for(method: str, topology: str) -> None:
    """To the byte, by kind and element type: so nothing was widened, and no collective was turned into another."""
    program = train_step(method, topology)
    assert operands(program.made) == operands(program.asked)
    asked = {field: {getattr(row, field) for row in program.asked.rows} for field in ("dtype", "kind")}
    gc.testing.assert_wire(
        program.made, axis=DATA, at_most=program.asked.sent, dtypes=asked["dtype"], kinds=asked["kind"]
    )


@on_one_node
def test_one_node_sends_what_was_predicted(method: str, topology: str) -> None:
    """To the byte: nothing is filled up."""
    workers = gpu.TOPOLOGIES[topology].size
    made, wanted = operands(train_step(method, topology).made), operands(programs.predicted(method, workers))
    made["all-reduce", "f32"] -= LOSS
    assert {key: put_in for key, put_in in made.items() if put_in} == wanted


@on_one_node
def test_one_node_has_no_dense_collective_of_floats(method: str, topology: str) -> None:
    largest = floats(train_step(method, topology).made, DATA)
    if method == DENSE:
        assert largest >= model.gradient_bytes()
    else:
        assert largest < smallest_matrix()


@on_nodes
def test_between_nodes_a_shard_sends_what_the_method_alone_would(method: str, topology: str) -> None:
    """``hierarchical``: between nodes, the method's own collectives for a GPU's shard, to the byte; and the loss."""
    where = gpu.TOPOLOGIES[topology]
    program = train_step(method, topology)
    wanted = operands(programs.predicted(method, where.parts, devices=where.inner_size))
    assert operands(program.made, (OUTER,)) == wanted
    assert operands(program.made, (OUTER, INNER)) == {("all-reduce", "f32"): LOSS}


@on_nodes
def test_on_nodes_nothing_is_sent_that_was_not_asked_for(method: str, topology: str) -> None:
    program = train_step(method, topology)
    for axis in ((OUTER,), (INNER,), (OUTER, INNER)):
        assert operands(program.made, axis) == operands(program.asked, axis)


@on_nodes
def test_within_a_node_a_reduce_scatter_stays_one(method: str, topology: str) -> None:
    """Of all gradients, and of no more; an all-reduce in its place would send twice the bytes."""
    made = operands(train_step(method, topology).made, (INNER,))
    # Vectors and the last rows of a matrix are filled up to a multiple of the GPUs.
    few = 4 * len(model.parameters()) * gpu.TOPOLOGIES[topology].inner_size
    assert model.gradient_bytes() <= made["reduce-scatter", "f32"] <= model.gradient_bytes() + few
    assert sum(put_in for (kind, _), put_in in made.items() if kind == "all-reduce") <= FEW


@on_nodes
def test_no_dense_float_crosses_nodes(method: str, topology: str) -> None:
    devices = gpu.TOPOLOGIES[topology].inner_size
    largest = floats(train_step(method, topology).made, OUTER)
    if method == DENSE:
        assert largest >= model.gradient_bytes() // devices
    elif method in LOW_RANK:
        # A shard of a matrix is a thin one, and its factors are less than half of it in bfloat16.
        assert largest < model.gradient_bytes() // 2 // devices // 2
    else:
        assert largest < smallest_matrix(devices)


@pytest.mark.parametrize(("method", "topology"), [*methods(ONE_NODE), *methods(SEVERAL)])
def test_a_step_fits_and_is_taken_in_place(method: str, topology: str) -> None:
    """Temporaries are a few gradients, the gradient itself and what the small model's padding adds included."""
    program = train_step(method, topology)
    assert program.peak < 1e9 * gpu.TOPOLOGIES[topology].memory
    assert program.memory.temp_size_in_bytes <= MOST_TEMPORARIES.get(method, 3) * model.gradient_bytes()
    # The parameters at least.
    assert program.memory.alias_size_in_bytes >= model.gradient_bytes()


def test_a_methods_workers_are_counted_once() -> None:
    """The mesh has the GPUs of one node as neighbours, so an exchange between nodes is of 2 workers and not of 8."""
    where = gpu.TOPOLOGIES[SEVERAL]
    nodes = [{device.process_index for device in row} for row in where.mesh().devices]
    assert [len(node) for node in nodes] == [1] * where.parts
    assert len(set().union(*nodes)) == where.parts
    assert math.prod(where.mesh().devices.shape) == where.size
