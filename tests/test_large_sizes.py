"""Beyond what an int32 counts: more than 2**31 entries, by shapes alone."""

from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax import kernels
from gradcomp_jax.core.layout import Group, Segment
from gradcomp_jax.methods.registry import METHODS
from tests.conformance.methods import FEW
from tests.marks import slow_but

AXIS, N = "data", 8
MOST = 2**31


@pytest.mark.parametrize("size", (MOST - 1, MOST, MOST + 5, 2 * MOST, 2 * MOST + 4095, 5 * MOST + 1))
def test_counts_of_rows(size: int) -> None:
    block = 4096
    start = np.arange(-(-size // block), dtype=np.int64) * block
    counts = np.asarray(jax.jit(lambda: kernels.valid_counts(size, block))())
    assert counts.dtype == np.int32
    np.testing.assert_array_equal(counts, np.clip(size - start, 0, block))
    group = Group(gc.compressors.topk(0.01, block=block), gc.memory.residual(), gc.collectives.AllGather(), "tree")
    (segment,) = group.placed([Segment((0, 1), size)])
    dealt, rows = np.asarray(jax.jit(lambda: group.counts(segment))()), segment.rows
    # Row j of R has the entries j, j + R, ...
    np.testing.assert_array_equal(dealt, (size - np.arange(rows, dtype=np.int64) + rows - 1) // rows)


def test_positions_that_differ_by_more_than_32_bits_draw_differently() -> None:
    draw = jax.jit(lambda key: kernels.hash_bits(key, (9, 500), stride=2**30))
    for seed in range(20):
        wide = np.asarray(draw(jax.random.key(seed)))
        # Of 4,500 draws of 32 bits, two are equal by chance in one seed of 400.
        assert len(np.unique(wide)) >= wide.size - 1


def eval_update(tx: Any, tree: Any) -> Any:
    """The jaxpr of one worker's update, of shapes."""

    def both(gradient: Any) -> Any:
        state = tx.init(gradient)
        return tx.update(gradient, state, gradient)

    return jax.make_jaxpr(both, axis_env=[(AXIS, N)])(tree)


@pytest.mark.parametrize("method", METHODS)
def test_a_leaf_that_is_too_large_is_refused_with_its_name_and_the_remedy(method: str) -> None:
    tx = METHODS[method].build(axis_name=AXIS)
    tree = {"embed": {"kernel": jax.ShapeDtypeStruct((2**16, 2**15), jnp.bfloat16)}}
    for call in (
        lambda: eval_update(tx, tree),
        lambda: jax.eval_shape(METHODS[method].build(axis_name=None).init, tree),
    ):
        with pytest.raises(ValueError, match=r"'embed/kernel' of shape \(65536, 32768\).*model_parallel.*split"):
            call()


def addressed(jaxpr: Any) -> Any:
    """The dimensions that int32 indices address, of every equation within a program."""
    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, equation.invars
        if name == "dynamic_slice":
            wanted = zip(inputs[0].aval.shape, equation.params["slice_sizes"], strict=True)
            yield from (size for size, taken in wanted if taken < size)
        elif name == "dynamic_update_slice":
            wanted = zip(inputs[0].aval.shape, inputs[1].aval.shape, strict=True)
            yield from (size for size, taken in wanted if taken < size)
        elif name in ("gather", "scatter", "scatter-add"):
            named = equation.params["dimension_numbers"]
            dims = named.start_index_map if name == "gather" else named.scatter_dims_to_operand_dims
            yield from (inputs[0].aval.shape[d] for d in dims)
        elif name == "iota":
            yield equation.params["shape"][equation.params["dimension"]]
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from addressed(inner)


@pytest.mark.parametrize("method", slow_but(FEW, METHODS))
def test_a_tree_of_more_than_an_int32_counts_is_exchanged(method: str) -> None:
    """No index addresses a dimension that it cannot count: pieces of one buffer are found by their owner's number."""
    tx = METHODS[method].build(axis_name=AXIS)
    tree = {f"layer_{i}": jax.ShapeDtypeStruct((2**14, 2**16), jnp.float32) for i in range(5)}
    program = eval_update(tx, tree)
    assert max(addressed(program.jaxpr), default=0) < MOST
    assert [v.aval.shape for v in program.jaxpr.outvars[:5]] == [(2**14, 2**16)] * 5
