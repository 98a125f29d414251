"""The measure of what crosses a TPU's main memory, on compiled programs whose traffic is known by hand."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import tpu_programs as tpu
from benchmarks import traffic as exchanges
from benchmarks.compiled.traffic import Traffic, traffic

from .programs import needs_compiler

pytestmark = needs_compiler

TRIPS = 56


def read(program: Callable[..., jax.Array], *shapes: tuple[int, ...]) -> tuple[Traffic, float]:
    """Returns what a program moves, and how many times the bytes of its first argument the compiler's own count is."""
    device = np.array(tpu.compiler_devices("v5e:2x2")[:1])
    place = NamedSharding(Mesh(device, ("one",)), PartitionSpec())
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place) for shape in shapes]
    compiled = jax.jit(program).lower(*arguments).compile()
    return traffic(compiled.as_text()), compiled.cost_analysis()["bytes accessed"] / (4 * np.prod(shapes[0]))


@pytest.mark.parametrize(
    ("program", "arguments", "passes"),
    [(lambda x: 2 * x, 1, 2), (lambda x, y: jnp.sin(x) * y + 1, 2, 3)],
    ids=("a copy", "a fused chain"),
)
def test_a_kernel_reads_its_arguments_and_writes_its_result(program, arguments: int, passes: int) -> None:
    shape = (16384, 4096)
    found, counted = read(program, *[shape] * arguments)
    assert found.bytes == passes * 4 * np.prod(shape) and found.launches == 1
    assert counted == passes


def test_a_loop_reads_in_every_trip() -> None:
    def total(x: jax.Array) -> jax.Array:
        def body(i: jax.Array, total: jax.Array) -> jax.Array:
            return total + jnp.sin(jax.lax.dynamic_index_in_dim(x, i, keepdims=False))

        return jax.lax.fori_loop(0, TRIPS, body, jnp.zeros(x.shape[1:]))

    shape = (TRIPS, 8192, 512)
    found, counted = read(total, shape)
    # The sum stays in vector memory until its one copy.
    assert 1 < found.bytes / (4 * np.prod(shape)) < 1 + 1.1 / TRIPS
    assert found.launches == TRIPS
    assert counted < 0.2


def test_what_stays_in_vector_memory_is_not_counted() -> None:
    def sorted_sums(x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jnp.cumsum(jnp.sort(x, axis=-1), axis=0)
        return x

    shape = (256, 1024)
    found, counted = read(sorted_sums, shape)
    assert found.bytes / (4 * np.prod(shape)) < 8 < 40 < counted


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "passes", "us"), [("v5p 2x2x1", 7.6, 420), ("v5e 2x2", 3.05, 1_060)])
def test_dense_bfloat16_in_lanes(chip: str, passes: float, us: float) -> None:
    """In rows a reduce takes a dimension of one away, for more time than all the rest."""
    leaf, kind = exchanges.LEAVES["8192 x 1024"], exchanges.CHIPS[chip]
    found, _ = exchanges.read("dense_bf16", leaf, kind)
    assert found.bytes <= passes * 4 * leaf["kernel"].size
    assert 1e6 * found.seconds(clock=kind.clock, bandwidth=kind.bandwidth) <= us
