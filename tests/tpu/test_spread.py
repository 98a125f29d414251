"""What an update looks at of a large tensor compiles for TPU; by one stride it did not."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import tpu_programs as tpu
from benchmarks.compiled.traffic import traffic
from gradcomp_jax.core.inbound import sample, sum_of_squares

from .programs import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize("shape", [(128_256, 4096), (2**24, 8), (82_815, 1024), (2**28,), (1, 2**28), (4, 3 * 2**24)])
def test_the_size_of_a_large_memory(shape: tuple[int, ...]) -> None:
    mesh = tpu.TOPOLOGIES["v5e 4x4"].mesh()
    kept = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))

    def update(memory: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        memory = 0.9 * memory + gradient
        return memory, sum_of_squares([[sample(memory)]])

    compiled = jax.jit(update, donate_argnums=0).lower(kept, kept).compile()
    # Two reads and a write.
    assert traffic(compiled.as_text()).bytes < 3.1 * kept.size * 4
