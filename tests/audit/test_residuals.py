"""Residuals that cross because a program pins a state replicated are told from all else that crosses."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc
from gradcomp_jax.audit.hlo import parse_module
from gradcomp_jax.audit.residuals import residual_gathers
from tests.training.problem import mesh_of

N, BLOCK = 4, 64
SHAPES = {"w": (16, 32), "b": (32,)}
# What a worker keeps: a residual for each entry of the matrix, and the ratio of it to the gradient.
KEPT = 4 * (16 * 32 + 1)


def lying(shapes, places):
    return jax.tree.map(lambda s, place: jax.ShapeDtypeStruct(s.shape, jnp.float32, sharding=place), shapes, places)


def everywhere(mesh):
    return NamedSharding(mesh, P())


def program(*, before=None, after=None, params_along=None, steps=1, **options):
    """An exchange in plain jit, of a state and parameters that ``before`` and ``after`` pin."""
    mesh = mesh_of(N)
    tx = gc.unreduced(optax.chain(gc.block_quantized(axis_name="data", block=BLOCK), optax.sgd(0.1)), mesh)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    state = jax.eval_shape(tx.init, params)
    gradient = jax.eval_shape(
        gc.local_value_and_grad(lambda p, x: x.mean() * sum(map(jnp.sum, p.values())), axis_name="data", mesh=mesh),
        params,
        jax.ShapeDtypeStruct((N,), jnp.float32),
    )[1]
    pin = lambda tree, how: tree if how is None else jax.lax.with_sharding_constraint(tree, how(tree, mesh))  # noqa: E731

    def step(carried, gradient):
        params, state = pin(carried, before)
        updates, state = tx.update(gradient, state, params)
        return pin((optax.apply_updates(params, updates), state), after)

    def run(carried, gradient):
        if steps == 1:
            return step(carried, gradient)
        return jax.lax.scan(lambda c, _: (step(c, gradient), None), carried, length=steps)[0]

    places = gc.state_shardings(state, mesh)
    state = jax.tree.map(lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), state, places)
    params = lying(params, dict.fromkeys(params, NamedSharding(mesh, P(params_along))))
    gradient = lying(gradient, gc.state_shardings(gradient, mesh))
    return gc.wire_bytes(jax.jit(run, **options).lower((params, state), gradient).compile())


def pinned(tree, mesh):
    return everywhere(mesh)


def right(tree, mesh):
    return gc.state_shardings(tree, mesh)


@functools.cache
def plain():
    return program()


def crossing(report) -> int:
    return report.by("residuals").get(True, gc.audit.Totals()).sent


def test_a_state_that_goes_in_and_out_as_it_is_does_not_cross() -> None:
    assert plain().sent == 1_011
    assert crossing(plain()) == 0 and "residuals cross" not in str(plain())
    gc.testing.assert_wire(plain(), at_most=1_011)


@pytest.mark.parametrize(
    "pins",
    [
        {"out_shardings": everywhere(mesh_of(N))},
        pytest.param({"before": pinned}, marks=pytest.mark.slow),
        pytest.param({"after": pinned}, marks=pytest.mark.slow),
        pytest.param({"after": pinned, "donate_argnums": 0}, marks=pytest.mark.slow),
    ],
    ids=["out_shardings", "before", "after", "donated"],
)
@pytest.mark.filterwarnings("ignore:the state is pinned replicated")
def test_a_state_that_is_pinned_replicated_crosses_and_the_report_says_so(pins) -> None:
    """An all-gather of what every worker keeps, beside what the exchange sends."""
    report = program(**pins)
    assert report.sent == 7_167
    assert crossing(report) == (N - 1) * KEPT == report.sent - plain().sent
    assert {(row.kind, row.dtype) for row in report.rows if row.residuals} == {("all-gather", "f32")}
    assert str(report).splitlines()[-1].startswith("residuals cross: 6,156 of these bytes")
    assert "gradcomp_jax.state_shardings" in str(report)
    # Nothing need be said of what is expected.
    with pytest.raises(AssertionError, match=r"^residuals cross: 6,156 of these bytes(.|\n)* residuals  "):
        gc.testing.assert_wire(report)


def test_a_state_that_is_pinned_by_its_own_shardings_does_not() -> None:
    assert program(before=right, after=right).sent == plain().sent


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the state is pinned replicated")
@pytest.mark.parametrize("pins", [{}, {"before": pinned}, {"after": pinned}], ids=["none", "before", "after"])
def test_it_is_followed_through_a_loop_of_steps(pins) -> None:
    report = program(steps=3, **pins)
    assert crossing(report) == (3 * (N - 1) * KEPT if pins else 0)
    assert report.sent - crossing(report) == 3 * plain().sent


def test_parameters_that_are_gathered_are_no_residuals() -> None:
    """As ZeRO keeps them, and with shards of the very shape of a memory."""

    def whole(tree, mesh):
        params, state = tree
        return dict.fromkeys(params, everywhere(mesh)), gc.state_shardings(state, mesh)

    report = program(before=whole, params_along="data")
    gathered = [row for row in report.rows if (row.kind, row.dtype) == ("all-gather", "f32")]
    assert sum(row.sent_bytes for row in gathered) >= (N - 1) * 4 * 16 * 32 // N
    assert crossing(report) == 0


def test_it_is_followed_through_the_two_halves_of_a_combined_gather() -> None:
    """As GPU's compiler writes them; a gather inside of shard_map is a method's own."""
    state = gc.PerDevice(0, 8)
    inside = 'metadata={op_name="jit(step)/shard_map/all_gather"}'
    text = f"""HloModule jit_step, num_partitions=4
ENTRY %main (a: f32[8,4], b: f32[8,4]) -> (f32[32,4], f32[32,4]) {{
  %a = f32[8,4]{{1,0}} parameter(0), metadata={{op_name="params"}}
  %b = f32[8,4]{{1,0}} parameter(1), metadata={{op_name="state.value"}}
  %own = f32[32,4]{{1,0}} all-gather(%b), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, {inside}
  %one = ((f32[8,4], f32[8,4]), (f32[32,4], f32[32,4])) all-gather-start(%a, %a), replica_groups={{{{0,1,2,3}}}}
  %one-done = (f32[32,4], f32[32,4]) all-gather-done(%one)
  %sum = f32[8,4]{{1,0}} add(%a, %b)
  %two = ((f32[8,4], f32[8,4]), (f32[32,4], f32[32,4])) all-gather-start(%a, %sum), replica_groups={{{{0,1,2,3}}}}
  %two-done = (f32[32,4], f32[32,4]) all-gather-done(%two)
  %first = f32[32,4] get-tuple-element(%one-done), index=0
  %second = f32[32,4] get-tuple-element(%two-done), index=1
  ROOT %tuple = (f32[32,4], f32[32,4]) tuple(%first, %second)
}}
"""
    trees = [jax.tree.structure(tree) for tree in (((0, state), {}), (0, state))]
    assert residual_gathers(parse_module(text), *trees) == {"two"}
    read = text.replace("all-gather-start(%a, %a)", "all-gather-start(%a, %b)")
    assert residual_gathers(parse_module(read), trees[0], jax.tree.structure((0, 0))) == {"one"}
