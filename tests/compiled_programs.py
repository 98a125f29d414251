"""What the tests of programs for TPU and for GPU share: their cases, and what they ask of a report of bytes."""

import math

import pytest

import gradcomp_jax as gc
from benchmarks.compiled import model
from gradcomp_jax.methods.registry import METHODS

QUICK = ("dense", "dgc", "terngrad", "block_quantized")
"""Methods whose programs for the smallest topology, and between slices or nodes, are compiled in the quick suite."""

FLOATS = ("f32", "bf16", "f16")
LOSS = 4
DENSE = "dense"
"""What is dense by name: the baseline in float32."""
LOW_RANK = ("powersgd", "dion")
"""Their payloads are float32 factors, those of all matrices in one all-reduce."""
WIDE = ("gradient_dropping", "topk_sgd", "random_k", "ef21", "demo", "sparcml")
"""Selections of ten entries of a block or more, which take more temporaries than others."""


def cases(topology: str, *, some_quick: bool) -> list:
    """Every registered method on a topology; all but a few are slow."""

    def case(name: str):
        # A program is compiled once for all tests of it.
        quick = some_quick and name in QUICK
        marks = [pytest.mark.xdist_group(f"{name} {topology}")] + ([] if quick else [pytest.mark.slow])
        return pytest.param(name, topology, marks=marks, id=f"{name}-{topology}")

    return [case(name) for name in METHODS]


def operands(report: gc.WireReport, axis: tuple[str, ...] | None = None) -> dict[tuple[str, str], int]:
    """Bytes put in by kind and element type, of the collectives along these axes."""
    sums: dict[tuple[str, str], int] = {}
    for row in report.rows:
        if axis is None or row.axis == axis:
            sums[row.kind, row.dtype] = sums.get((row.kind, row.dtype), 0) + row.operand_bytes
    return sums


def count(report: gc.WireReport, kind: str, dtype: str) -> int:
    """How many collectives of a kind and element type run."""
    return sum(row.count for row in report.rows if (row.kind, row.dtype) == (kind, dtype))


def smallest_matrix(devices: int = 1) -> int:
    """Bytes of the smallest compressed leaf, or of a device's shard of it, in bfloat16."""
    return min(2 * math.prod(leaf.shape) for leaf in model.parameters().values() if len(leaf.shape) > 1) // devices


def floats(report: gc.WireReport, *axes: str) -> int:
    """The largest operand of floating-point numbers that crosses one of the axes."""
    between = [row for row in report.rows if row.axis is None or set(row.axis) & set(axes)]
    return max((row.operand_bytes for row in between if row.dtype in FLOATS), default=0)
