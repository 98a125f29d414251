"""The real TPU compiler, without a TPU: passes, kernels and temporaries of every method. Needs libtpu (the extra ``tpu``)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gradcomp_jax as gc
from benchmarks import tpu_programs as tpu
from benchmarks.compiled import model, passes
from benchmarks.compiled.traffic import traffic
from gradcomp_jax import kernels
from gradcomp_jax.kernels import dealt_on_tpu
from gradcomp_jax.kernels.dealt_selection import _run_on_tpu
from gradcomp_jax.methods.registry import METHODS

from .programs import needs_compiler

pytestmark = needs_compiler

# 2**25 entries: of a smaller array some may stay in VMEM, and crosses main memory less often than once for each reader.
SHAPE = (2**15, 1024)
GRADIENT = 4 * SHAPE[0] * SHAPE[1]


@pytest.fixture(scope="module")
def one_device() -> NamedSharding:
    devices = tpu.compiler_devices("v5e:2x2")
    return NamedSharding(Mesh(np.array(devices[:1]), ("one",)), PartitionSpec())


def compiled_for(place: NamedSharding, shape: tuple[int, ...]) -> jax.stages.Compiled:
    """A whole local DGC step with its state donated."""
    tx = gc.dgc(axis_name=None, mask=True)
    gradient = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
    state = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), jax.eval_shape(tx.init, gradient)
    )
    return jax.jit(lambda g, s: tx.update(g, s)[1], donate_argnums=1).lower(gradient, state).compile()


@pytest.fixture
def pallas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes kernels as a process with a TPU does, whose check they passed."""
    monkeypatch.setenv(dealt_on_tpu.SWITCH, "1")


@pytest.mark.parametrize(
    ("shape", "most", "temporaries"),
    [(SHAPE, 8.05, 0.1), pytest.param((SHAPE[0] * SHAPE[1],), 10.05, 1.05, marks=pytest.mark.slow)],
)
def test_a_dgc_step_reads_and_writes_what_it_must(
    one_device: NamedSharding, pallas: None, shape: tuple[int, ...], most: float, temporaries: float
) -> None:
    """Gradient, velocity and accumulator read twice, the last two written once: eight. A flat vector's tiles are not those of
    rows, and it is copied once. By XLA's programs alone the compiler counts 16.3 and 20.0.
    """
    compiled = compiled_for(one_device, shape)
    assert traffic(compiled.as_text()).bytes <= most * GRADIENT
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes <= temporaries * GRADIENT
    assert memory.alias_size_in_bytes >= 2 * GRADIENT


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize("size", [(2**29, 1024), (2**26, 2**15), (2**20, 128)])
def test_kernels_of_the_largest_tensors_fit_the_vector_memory(pallas: None, chip: str, size: tuple[int, int]) -> None:
    entries, width = size
    deal = kernels.Deal(entries, 1024 if entries > 2**20 else 128, max(width, entries // 1024))
    assert dealt_on_tpu.takes(deal, width)
    place = NamedSharding(Mesh(np.array(tpu.compiler_devices(chip)[:1]), ("one",)), PartitionSpec())
    matrix, index, value = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        for shape, dtype in (
            ((entries // width, width), jnp.float32),
            ((deal.rows, 2), jnp.int32),
            ((deal.rows, 2), jnp.float32),
        )
    )

    def both(matrix: jax.Array, index: jax.Array, value: jax.Array) -> tuple[jax.Array, ...]:
        placed = (dealt_on_tpu.placed_in_matrix(index, v, deal, width) for v in (value, value.astype(jnp.bfloat16)))
        parts = kernels.Parts((matrix, matrix, matrix), lambda a, b, c: 0.9 * a + b + c)
        run, apart = _run_on_tpu(deal, 2)
        found = (dealt_on_tpu.best_of_dealt(parts, deal, 11, *runs) for runs in ((), (run, apart)))
        return *found, *placed

    text = jax.jit(both).lower(matrix, index, value).compile().as_text()
    assert passes.bytes_of_pallas(text) >= 10 * entries


def test_several_entries_of_a_block_come_from_the_approximate_top_k(one_device) -> None:
    """One pass to the lanes' best and little after it; found one after the other they would take five."""
    rows = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=one_device)
    compiled = (
        jax.jit(lambda x: gc.compressors.topk(4 / 1024).encode(x, (), gc.compressors.RowInfo())[0])
        .lower(rows)
        .compile()
    )
    assert traffic(compiled.as_text()).bytes <= 1.05 * GRADIENT


# Passes, kernels and temporaries in gradients where the goal is not reached, and why. A method that comes below its line gets a
# tighter one, or none. In all of them what is rows or lines lies in other tiles than the leaf, and each change is a read and a
# write. Loops count as often as they run. Decoded rows that are held, for fewer bytes of main memory, are one or two of the
# temporaries.
CEILINGS = {
    # A collective's operand is a copy.
    "dense": (4, 11, 0.1),
    # Halves of words lie in other tiles than words: each cast is a copy, and leaves are joined and cut.
    "dense_bf16": (8.5, 45, 1.1),
    "stochastic_rounding": (10, 71, 0.6),
    # Each leaf has kernels that draw, encode and decode.
    "terngrad": (9, 117, 0.3),
    "qsgd": (8, 110, 0.2),
    # Bits are packed by shifts, a kernel for each.
    "sign_sgd": (8.5, 165, 0.7),
    "ef_sign_sgd": (15.5, 204, 1.5),
    # What is selected is laid out as lines, and copied to the leaf; kernels of Pallas have no such copy.
    "dgc": (23, 157, 2),
    # The same, and ten columns for ten entries.
    "topk_sgd": (25.5, 181, 2.1),
    # One array of all leaves: its words cross in lanes, which takes fewer passes and more memory.
    "gradient_dropping": (59, 236, 6),
    "ef21": (27.5, 187, 2.1),
    # What the others found is scattered into rows, which are laid out as a vector and then as the leaf.
    "sparcml": (39, 232, 2.7),
    # Positions are drawn.
    "random_k": (9.5, 181, 0.2),
    # A code for each column: a transposition in each direction; updates and memories of all leaves are copied last.
    "one_bit_sgd": (15, 320, 1.3),
    # Codes of 8 bits lie in other tiles than words, and a scale for each row is written out dense.
    "fp8": (16, 109, 0.7),
    "block_quantized": (16.5, 110, 0.6),
    # Each of the two phases is a branch that copies the state.
    "one_bit_adam": (25, 232, 3),
    # The chosen of a block are put in order by a sort, and bits of positions are packed in layouts that are copied.
    "topk_two_bits": (32, 470, 2.2),
    # Sums stand in memory before the products; factors are made orthogonal column by column.
    "powersgd": (9, 229, 0.2),
    # A loop over the columns, whose kernels are small.
    "dion": (9.5, 839, 0.2),
    # A transform there and one back, and a sort.
    "demo": (34.5, 162, 2.1),
    # A rotation there and one back, each one product, and a scale for each row.
    "eden": (22, 259, 0.4),
}


EXCEEDED = {"sparcml": 3.3, "one_bit_sgd": 1.5}
"""Temporaries of what is above its line."""


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_passes_kernels_and_temporaries(method: str) -> None:
    row = passes.measure(method, model.few_leaves(), tpu.LARGE)
    most = CEILINGS.get(method) or passes.goal(method, model.few_leaves())
    if most[2] < row.temporaries <= EXCEEDED.get(method, 0) and passes.within(row, (*most[:2], EXCEEDED[method])):
        pytest.xfail(f"temporaries are {row.temporaries} gradients, above {most[2]}")
    assert passes.within(row, most), (row, most)


@pytest.mark.slow
def test_few_entries_are_placed_once_before_they_are_laid_out_as_a_leaf_of_another_width() -> None:
    row = passes.measure("random_k", model.square(), tpu.LARGE)
    assert (row.passes <= 12.6, row.temporaries <= 1.2) == (True, True), row


@pytest.mark.slow
def test_fewer_passes_with_kernels_of_pallas(pallas: None) -> None:
    row = passes.measure("dgc", model.few_leaves(), tpu.LARGE)
    assert passes.within(row, (13, 138, 0.6)), row
