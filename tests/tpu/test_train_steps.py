"""The train step of every method, compiled by the real TPU compiler: what it sends is what was predicted, and no more.

Two predictions, neither by the TPU compiler: ``predicted`` is the method alone, lowered for CPU; ``asked`` is the train step as
it was lowered for TPU, which differs from it by the filling of all-gathers up to a multiple of 128 entries.
"""

import math

import pytest

import gradcomp_jax as gc
from benchmarks import tpu_programs as tpu
from gradcomp_jax.collectives import gathering
from gradcomp_jax.collectives.gathering import LANES

from .programs import ONE_SLICE, SLICED, methods, needs_compiler

pytestmark = needs_compiler

SLICES = tpu.TOPOLOGIES[SLICED].slices
ITEMSIZE = {"u8": 1, "s8": 1, "u16": 2, "bf16": 2, "u32": 4, "f32": 4, "s32": 4}
FLOATS = ("f32", "bf16", "f16")
# Bytes to which the compiler fills an all-reduce between slices up: a tile of 1024 numbers.
TILE = 4096
LOSS = 4
# What is dense by name: the baseline in float32.
DENSE = "dense"
# Its payloads are float32 factors, those of all matrices in one all-reduce.
LOW_RANK = "powersgd"
# Selections of ten entries of a block or more, which take more temporaries than others.
WIDE = ("gradient_dropping", "topk_sgd", "random_k", "ef21", "demo", "sparcml")

on_one_slice = pytest.mark.parametrize(
    ("method", "topology"), [case for topology in ONE_SLICE for case in methods(topology)]
)
on_slices = pytest.mark.parametrize(("method", "topology"), methods(SLICED))


def operands(report: gc.WireReport, axis: tuple[str, ...] | None = None) -> dict[tuple[str, str], int]:
    """Bytes put in by kind and element type, of the collectives along these axes."""
    sums: dict[tuple[str, str], int] = {}
    for row in report.rows:
        if axis is None or row.axis == axis:
            sums[row.kind, row.dtype] = sums.get((row.kind, row.dtype), 0) + row.operand_bytes
    return sums


def count(report: gc.WireReport, kind: str, dtype: str) -> int:
    return sum(row.count for row in report.rows if (row.kind, row.dtype) == (kind, dtype))


def filling(report: gc.WireReport) -> dict[tuple[str, str], int]:
    """The most that filled up shards can add, by kind and element type, to what a device puts into all-gathers."""
    return {
        (kind, dtype): count(report, kind, dtype) * (LANES - 1) * ITEMSIZE[dtype]
        for kind, dtype in operands(report)
        if kind == "all-gather"
    }


def smallest_matrix(devices: int = 1) -> int:
    """Bytes of the smallest compressed leaf, or of a chip's shard of it, in bfloat16."""
    return min(2 * math.prod(leaf.shape) for leaf in tpu.parameters().values() if len(leaf.shape) > 1) // devices


def floats(report: gc.WireReport, *axes: str) -> int:
    """The largest operand of floating-point numbers that crosses one of the axes."""
    between = [row for row in report.rows if row.axis is None or set(row.axis) & set(axes)]
    return max((row.operand_bytes for row in between if row.dtype in FLOATS), default=0)


@on_one_slice
def test_one_slice_sends_what_was_asked_for(method: str, topology: str) -> None:
    """To the byte, by kind and element type: so no all-gather became an all-reduce, and nothing was widened."""
    program = tpu.train_step(method, topology)
    assert operands(program.made) == operands(program.asked)


@on_one_slice
def test_one_slice_sends_what_was_predicted(method: str, topology: str) -> None:
    program = tpu.train_step(method, topology)
    chips = program_size(topology)
    predicted = tpu.predicted(method, chips)
    # A shard is filled up once and sent to everybody else.
    most = (chips - 1) * sum(filling(predicted).values())
    loss = math.ceil(2 * (chips - 1) * LOSS / chips)
    # Each row of a report is rounded up to a whole byte.
    rounding = len(predicted.rows) + len(program.made.rows)
    assert -rounding <= program.made.sent - predicted.sent - loss <= most + rounding


@on_one_slice
def test_one_slice_has_no_dense_collective_of_floats(method: str, topology: str) -> None:
    largest = floats(tpu.train_step(method, topology).made, tpu.DATA)
    if method == DENSE:
        assert largest >= tpu.gradient_bytes()
    else:
        assert largest < smallest_matrix()


def program_size(topology: str) -> int:
    return tpu.TOPOLOGIES[topology].mesh().size


@on_slices
def test_between_slices_a_shard_sends_what_the_method_alone_would(method: str, topology: str) -> None:
    """``hierarchical``: between slices, the method's own collectives for a chip's shard, and the loss."""
    program = tpu.train_step(method, topology, hierarchical=True)
    predicted = tpu.predicted(method, SLICES, devices=program_size(topology) // SLICES)
    wanted, made = operands(predicted), operands(program.made, (tpu.SLICES,))
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
    program = tpu.train_step(method, topology, hierarchical=True)
    asked, made = operands(program.asked, (tpu.SLICES,)), operands(program.made, (tpu.SLICES,))
    extra = made.pop(("all-reduce", "f32")) - asked.pop(("all-reduce", "f32"), 0)
    assert LOSS <= extra < TILE * count(program.made, "all-reduce", "f32")
    assert made == asked


@on_slices
def test_within_a_slice_a_reduce_scatter_stays_one(method: str, topology: str) -> None:
    """Of all gradients, filled up to tiles; an all-reduce in its place would send twice the bytes."""
    made = operands(tpu.train_step(method, topology, hierarchical=True).made, (tpu.CHIPS,))
    chips = program_size(topology) // SLICES
    tiles = chips * 4 * gathering.LANES * gathering.ROWS
    assert tpu.gradient_bytes() <= made["reduce-scatter", "f32"] < tpu.gradient_bytes() + tiles
    assert made.get(("all-reduce", "f32"), 0) <= TILE


@on_slices
@pytest.mark.parametrize("hierarchical", [False, True], ids=["all-chips", "hierarchical"])
def test_no_dense_float_crosses_slices(method: str, topology: str, hierarchical: bool) -> None:
    program = tpu.train_step(method, topology, hierarchical=hierarchical)
    chips = program_size(topology) // SLICES
    largest = floats(program.made, tpu.SLICES)
    if method == DENSE:
        # The compiler itself reduces within a slice first.
        assert largest >= tpu.gradient_bytes() // chips
    elif hierarchical and method == LOW_RANK:
        # A shard of a matrix is a thin one, and its factors are a quarter of it in bfloat16.
        assert largest < tpu.gradient_bytes() // 2 // chips // 4
    elif hierarchical:
        assert largest < smallest_matrix(chips)
    else:
        assert largest < smallest_matrix()


@on_slices
def test_a_method_over_all_chips_crosses_slices_with_what_was_asked_for(method: str, topology: str) -> None:
    """The compiler takes an all-gather over both axes in two steps, between slices first: each shard crosses once a slice."""
    program = tpu.train_step(method, topology)
    both, chips = (tpu.SLICES, tpu.CHIPS), program_size(topology) // SLICES
    asked, between, inside = (operands(program.asked, both), *(operands(program.made, (axis,)) for axis in both))
    for kind, dtype in asked:
        if kind == "all-to-all":
            assert operands(program.made, both)[kind, dtype] == asked[kind, dtype]
        elif kind == "all-gather":
            assert between[kind, dtype] == asked[kind, dtype]
            assert inside[kind, dtype] == SLICES * asked[kind, dtype]
        else:
            assert kind == "all-reduce"
            shard = asked[kind, dtype] // chips if method == DENSE else asked[kind, dtype]
            assert 0 <= between[kind, dtype] - shard < TILE * count(program.made, kind, dtype)
    assert set(between) | set(operands(program.made, both)) == set(asked)


@pytest.mark.parametrize(
    ("method", "topology"), [case for topology in (*ONE_SLICE, SLICED) for case in methods(topology)]
)
def test_a_step_fits(method: str, topology: str) -> None:
    """State, gradients and temporaries: a few gradients, far below a chip's memory, and the state is updated in place."""
    for hierarchical in (False, True) if topology == SLICED else (False,):
        program = tpu.train_step(method, topology, hierarchical=hierarchical)
        assert program.peak < 1e9 * tpu.TOPOLOGIES[topology].hbm
        # The v5e holds most of a small model's in its vector memory.
        most = 8 if method in WIDE and not topology.startswith("v5e") else 3
        assert program.memory.temp_size_in_bytes <= most * tpu.gradient_bytes()
        # The parameters at least.
        assert program.memory.alias_size_in_bytes >= tpu.gradient_bytes()
