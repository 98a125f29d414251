"""All-gathers as the real TPU compiler makes them: none becomes an all-reduce, which would send twice the bytes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import gradcomp_jax as gc
from benchmarks import tpu_programs as tpu
from gradcomp_jax import _compat
from gradcomp_jax.collectives.tpu import LANES, all_gather
from tests.compiled_programs import check_gathered_parameters

from .programs import ONE_SLICE, SLICED, needs_compiler

pytestmark = needs_compiler

SIZES = (1, 100, LANES, 1000, 2**14)


def gathered(gather, topology: str, entries: int, dtype: str) -> tuple[gc.WireReport, int]:
    """The audit of an all-gather along the slowest axis, and how many devices take part."""
    mesh = tpu.TOPOLOGIES[topology].mesh()
    slow, all_axes = mesh.axis_names[0], PartitionSpec(mesh.axis_names)
    shape = jax.ShapeDtypeStruct((mesh.size * entries,), jnp.dtype(dtype), sharding=NamedSharding(mesh, all_axes))
    out = PartitionSpec(mesh.axis_names[1:])
    mapped = jax.shard_map(lambda x: gather(x, slow), mesh=mesh, in_specs=all_axes, out_specs=out)
    return gc.wire_bytes(jax.jit(mapped).lower(shape).compile(), mesh=mesh), mesh.shape[slow]


@pytest.mark.parametrize("topology", tpu.TOPOLOGIES)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_a_gather_stays_a_gather(topology: str, dtype: str) -> None:
    for entries in SIZES:
        report, workers = gathered(all_gather, topology, entries, dtype)
        assert {row.kind for row in report.rows} == {"all-gather"}
        filled = -(-entries // LANES) * LANES
        assert report.sent == (workers - 1) * filled * jnp.dtype(dtype).itemsize
        gc.testing.assert_wire(report, kinds="all-gather", dtypes=dtype, at_most=report.sent)


@pytest.mark.parametrize(
    ("topology", "entries"), [(ONE_SLICE[0], 1000), (ONE_SLICE[1], 1024), (ONE_SLICE[2], 1024), (SLICED, 1000)]
)
def test_a_plain_gather_would_not(topology: str, entries: int) -> None:
    """Why there is another form: once the compiler leaves these as they are, it can go."""
    report, workers = gathered(_compat.all_gather, topology, entries, "uint16")
    assert {row.kind for row in report.rows} == {"all-reduce"}
    assert report.sent >= 2 * (workers - 1) * entries * 2
    with pytest.raises(AssertionError, match=r"kind all-reduce: .* expected all-gather"):
        gc.testing.assert_wire(report, kinds="all-gather")


@pytest.mark.slow
def test_parameters_in_four_bits() -> None:
    check_gathered_parameters(tpu.TOPOLOGIES[ONE_SLICE[0]].mesh())
