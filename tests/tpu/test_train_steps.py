"""The train step of every method, compiled by the real TPU compiler: what it sends is what was predicted, and no more.

Two predictions, neither by the TPU compiler: ``predicted`` is the method alone, lowered for CPU; ``asked`` is the train step as
it was lowered for TPU, which differs from it by the filling of all-gathers up to a multiple of 128 entries.
"""

import math

import pytest

import gradcomp_jax as gc
from benchmarks import tpu_programs as tpu
from benchmarks.compiled import model, programs
from benchmarks.compiled.programs import DATA, INNER, OUTER
from gradcomp_jax.collectives.tpu import LANES, ROWS
from tests.compiled_programs import DENSE, LOSS, LOW_RANK, WIDE, count, floats, operands, smallest_matrix

from .programs import ONE_SLICE, SLICED, methods, needs_compiler

pytestmark = needs_compiler

SLICES = tpu.TOPOLOGIES[SLICED].parts
ITEMSIZE = {"u8": 1, "s8": 1, "u16": 2, "bf16": 2, "u32": 4, "f32": 4, "s32": 4}
# Bytes to which the compiler fills an all-reduce between slices up: a tile of 1024 numbers.
TILE = 4096

on_one_slice = pytest.mark.parametrize(
    ("method", "topology"), [case for topology in ONE_SLICE for case in methods(topology)]
)
on_slices = pytest.mark.parametrize(("method", "topology"), methods(SLICED))


def train_step(method: str, topology: str, *, hierarchical: bool = False) -> programs.Program:
    return programs.train_step(method, tpu.TOPOLOGIES[topology], hierarchical=hierarchical)


def filling(report: gc.WireReport) -> dict[tuple[str, str], int]:
    """The most that filled up shards can add, by kind and element type, to what a device puts into all-gathers."""
    return {
        (kind, dtype): count(report, kind, dtype) * (LANES - 1) * ITEMSIZE[dtype]
        for kind, dtype in operands(report)
        if kind == "all-gather"
    }


@on_one_slice
def test_one_slice_sends_what_was_asked_for(method: str, topology: str) -> None:
    """To the byte, by kind and element type: so no all-gather became an all-reduce, and nothing was widened."""
    program = train_step(method, topology)
    assert operands(program.made) == operands(program.asked)


@on_one_slice
def test_one_slice_sends_what_was_predicted(method: str, topology: str) -> None:
    program = train_step(method, topology)
    chips = tpu.TOPOLOGIES[topology].size
    predicted = programs.predicted(method, chips)
    # A shard is filled up once and sent to everybody else.
    most = (chips - 1) * sum(filling(predicted).values())
    loss = math.ceil(2 * (chips - 1) * LOSS / chips)
    # Each row of a report is rounded up to a whole byte.
    rounding = len(predicted.rows) + len(program.made.rows)
    assert -rounding <= program.made.sent - predicted.sent - loss <= most + rounding


@on_one_slice
def test_one_slice_has_no_dense_collective_of_floats(method: str, topology: str) -> None:
    largest = floats(train_step(method, topology).made, DATA)
    if method == DENSE:
        assert largest >= model.gradient_bytes()
    else:
        assert largest < smallest_matrix()


@on_slices
def test_between_slices_a_shard_sends_what_the_method_alone_would(method: str, topology: str) -> None:
    """``hierarchical``: between slices, the method's own collectives for a chip's shard, and the loss."""
    program = train_step(method, topology, hierarchical=True)
    predicted = programs.predicted(method, SLICES, devices=tpu.TOPOLOGIES[topology].inner_size)
    wanted, made = operands(predicted), operands(program.made, (OUTER,))
    assert set(made) == set(wanted) | {("all-reduce", "f32")}
    for key, filled in filling(predicted).items():
        assert 0 <= made.pop(key) - wanted.pop(key) <= filled
    summed = "all-reduce", "f32"
    tiles = TILE * count(program.made, *summed)
    assert 0 <= made.pop(summed) - wanted.pop(summed, 0) - LOSS < tiles
    assert made == wanted


@on_slices
def test_between_slices_nothing_is_sent_that_was_not_asked_for(method: str, topology: str) -> None:
    """The same to the byte against the program as it was lowered, but for the tiles of all-reduces."""
    program = train_step(method, topology, hierarchical=True)
    asked, made = operands(program.asked, (OUTER,)), operands(program.made, (OUTER,))
    extra = made.pop(("all-reduce", "f32")) - asked.pop(("all-reduce", "f32"), 0)
    assert LOSS <= extra < TILE * count(program.made, "all-reduce", "f32")
    assert made == asked


@on_slices
def test_within_a_slice_a_reduce_scatter_stays_one(method: str, topology: str) -> None:
    """Of all gradients, filled up to tiles; an all-reduce in its place would send twice the bytes."""
    made = operands(train_step(method, topology, hierarchical=True).made, (INNER,))
    chips = tpu.TOPOLOGIES[topology].inner_size
    tiles = chips * 4 * LANES * ROWS
    assert model.gradient_bytes() <= made["reduce-scatter", "f32"] < model.gradient_bytes() + tiles
    assert made.get(("all-reduce", "f32"), 0) <= TILE


@on_slices
@pytest.mark.parametrize("hierarchical", [False, True], ids=["all-chips", "hierarchical"])
def test_no_dense_float_crosses_slices(method: str, topology: str, hierarchical: bool) -> None:
    program = train_step(method, topology, hierarchical=hierarchical)
    chips = tpu.TOPOLOGIES[topology].inner_size
    largest = floats(program.made, OUTER)
    if method == DENSE:
        # The compiler itself reduces within a slice first, each large tensor by itself.
        between = operands(program.made, (OUTER,))
        assert between["all-reduce", "f32"] >= model.gradient_bytes() // chips
    elif hierarchical and method in LOW_RANK:
        # A shard of a matrix is a thin one, and its factors are a quarter of it in bfloat16, or of rank 16 nearly all of it.
        assert largest < model.gradient_bytes() // 2 // chips // (1 if method == "dion" else 4)
    elif hierarchical:
        assert largest < smallest_matrix(chips)
    else:
        assert largest < smallest_matrix()


@on_slices
def test_a_method_over_all_chips_crosses_slices_with_what_was_asked_for(method: str, topology: str) -> None:
    """The compiler takes an all-gather over both axes in two steps, between slices first: each shard crosses once a slice."""
    program = train_step(method, topology)
    both, chips = (OUTER, INNER), tpu.TOPOLOGIES[topology].inner_size
    asked, between, inside = (operands(program.asked, both), *(operands(program.made, (axis,)) for axis in both))
    for kind, dtype in asked:
        if kind == "all-to-all":
            assert operands(program.made, both)[kind, dtype] == asked[kind, dtype]
        elif kind == "all-gather":
            assert between[kind, dtype] == asked[kind, dtype]
            assert inside[kind, dtype] == SLICES * asked[kind, dtype]
        else:
            assert kind == "all-reduce"
            # Factors of rank 16 are as large as to be reduced within a slice first, like what is dense.
            shard = asked[kind, dtype] // chips if method in (DENSE, "dion") else asked[kind, dtype]
            assert 0 <= between[kind, dtype] - shard < TILE * count(program.made, kind, dtype)
    assert set(between) | set(operands(program.made, both)) == set(asked)


@pytest.mark.parametrize(
    ("method", "topology"), [case for topology in (*ONE_SLICE, SLICED) for case in methods(topology)]
)
def test_a_step_fits(method: str, topology: str) -> None:
    """State, gradients and temporaries: a few gradients, far below a chip's memory, and the state is updated in place."""
    for hierarchical in (False, True) if topology == SLICED else (False,):
        program = train_step(method, topology, hierarchical=hierarchical)
        assert program.peak < 1e9 * tpu.TOPOLOGIES[topology].memory
        # The v5e holds most of a small model's in its vector memory. What the others found is scattered from words in lanes.
        most = (8 if method == "sparcml" else 6) if method in WIDE and not topology.startswith("v5e") else 3
        assert program.memory.temp_size_in_bytes <= most * model.gradient_bytes()
        # The parameters at least.
        assert program.memory.alias_size_in_bytes >= model.gradient_bytes()
