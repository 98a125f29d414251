"""All-to-alls of long rows as the real TPU compiler makes them: they stay what they are, and are filled up to lanes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import gradcomp_jax as gc
from benchmarks import tpu_programs as tpu
from gradcomp_jax.collectives import fused
from gradcomp_jax.collectives.tpu import LANES, LONG

from .programs import needs_compiler

pytestmark = needs_compiler


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "dtype"), [((LONG + 5, 7, 300), jnp.uint8), ((LONG + 5,), jnp.uint16)], ids=("several", "alone")
)
@pytest.mark.parametrize("topology", tpu.TOPOLOGIES)
def test_long_rows_stay_an_all_to_all(topology: str, lengths: tuple[int, ...], dtype) -> None:
    """Along the slowest axis: between slices, or among all chips of one."""
    mesh = tpu.TOPOLOGIES[topology].mesh()
    slow, all_axes = mesh.axis_names[0], PartitionSpec(mesh.axis_names)
    workers = mesh.shape[slow]
    shapes = [
        jax.ShapeDtypeStruct((mesh.size * workers, n), dtype, sharding=NamedSharding(mesh, all_axes)) for n in lengths
    ]
    mapped = jax.shard_map(lambda *a: fused.all_to_all(a, slow), mesh=mesh, in_specs=all_axes, out_specs=all_axes)
    report = gc.wire_bytes(jax.jit(mapped).lower(*shapes).compile(), mesh=mesh)
    assert {row.kind for row in report.rows} == {"all-to-all"}
    # The short ones are filled up together.
    filled = sum(-(-n // LANES) * LANES for n in (lengths[0], sum(lengths[1:])))
    assert report.sent == (workers - 1) * filled * jnp.dtype(dtype).itemsize
