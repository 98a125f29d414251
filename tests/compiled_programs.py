"""What the tests of programs for TPU and for GPU share: their cases, and what they ask of a report of bytes."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc
from benchmarks.compiled import model
from benchmarks.compiled.programs import DATA, Topology, outer_steps
from gradcomp_jax.methods.registry import METHODS
from tests.dependencies import waits_for

QUICK = ("dense", "dgc", "terngrad", "block_quantized")
"""Methods whose programs for the smallest topology, and between slices or nodes, are compiled in the quick suite."""

FLOATS = ("f32", "bf16", "f16")
LOSS = 4
DENSE = "dense"
"""What is dense by name: the baseline in float32."""
LOW_RANK = ("powersgd", "dion")
"""Their payloads are float32 factors, those of all matrices in one all-reduce."""
WIDE = ("gradient_dropping", "topk_sgd", "topk_two_bits", "random_k", "ef21", "demo", "sparcml")
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
    """Bytes put in by kind and element type, of the collectives along these axes, none of which carries residuals."""
    assert not any(row.residuals for row in report.rows), str(report)
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


def exchanges_wait(topology: Topology, delay: int) -> list[bool]:
    """For each fragment of Streaming DiLoCo in E3M0 whether its exchange waits for the batch of the step that it is in."""
    method = gc.block_quantized(axis_name=DATA, bits=4, format="e3m0")
    outer = gc.diloco(method, axis_name=DATA, parts=4, delay=delay, mix=0.5)
    text = outer_steps(outer, topology).as_text()
    # The tensors of the batch are the last arguments; the loss and a count are a few bytes.
    return waits_for(text, range(-len(model.few_leaves()), 0), least_bytes=100)


def check_gathered_parameters(mesh: jax.sharding.Mesh) -> None:
    """Parameters along a mesh's last axis cross in one all-gather of four bits and scales, and no dense copy is made."""
    axis, shapes, block = mesh.axis_names[-1], {"up": (1024, 4096), "down": (4096, 1024)}, 2048
    specs, values = {"up": P(axis), "down": P(None, axis)}, 2 * 1024 * 4096

    def gathered(shards, base):
        code = gc.compressors.block_quantized(bits=4, block=block)
        return gc.gather_params(shards, specs, axis_name=axis, compressor=code, base=base)

    def lying(dtype, specs):
        return {k: jax.ShapeDtypeStruct(s, dtype, sharding=NamedSharding(mesh, specs[k])) for k, s in shapes.items()}

    mapped = jax.jit(jax.shard_map(gathered, mesh=mesh, in_specs=(specs, P()), out_specs=P()), donate_argnums=1)
    compiled = mapped.lower(lying(jnp.float32, specs), lying(jnp.bfloat16, dict.fromkeys(shapes, P()))).compile()
    report = gc.wire_bytes(compiled)
    (row,) = report.rows
    workers = mesh.shape[axis]
    assert (row.kind, row.dtype) == ("all-gather", "u8")
    assert report.sent == (workers - 1) * values // workers // block * (block // 2 + 4)
    assert compiled.memory_analysis().temp_size_in_bytes < values
