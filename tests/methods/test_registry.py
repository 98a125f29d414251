"""The table of methods says what their compiled programs do."""

import inspect

import jax
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax.cli import method_table
from gradcomp_jax.methods import registry
from tests.conformance.methods import FEW
from tests.marks import slow_but

AXIS, N, SHAPE = "workers", 8, (512, 256)
each_method = pytest.mark.parametrize("name", registry.METHODS)


def compiled(name: str):
    """The method's step for the table's matrix, on eight devices."""
    tx = registry.METHODS[name].build(axis_name=AXIS)
    mesh = jax.make_mesh((N,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    state = gc.init_state({"w": np.zeros(SHAPE, np.float32)}, tx, mesh, axis_name=AXIS).opt_state
    specs, P = gc.state_specs(state, axis_name=AXIS), jax.sharding.PartitionSpec

    def step(gradient, state):
        return tx.update({"w": gradient}, state, {"w": np.zeros(SHAPE, np.float32)})

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(AXIS), specs), out_specs=(P(), specs))
    return jax.jit(mapped).lower(np.zeros((N * SHAPE[0], SHAPE[1]), np.float32), state).compile(), state


@pytest.mark.parametrize("name", [name for name in registry.METHODS if name in FEW])
def test_the_table_is_what_the_compiled_program_sends(name: str) -> None:
    """Of a few. It is what an exchange describes: test_wire.py holds that of every method against its program."""
    program, state = compiled(name)
    row = method_table._row(name, N, SHAPE)
    size = SHAPE[0] * SHAPE[1]
    assert gc.wire_bytes(program, branch=-1).sent == round(row.sent * size / 8)
    marked = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, gc.PerDevice))
    held = sum(a.value.nbytes // N if isinstance(a, gc.PerDevice) else a.nbytes for a in marked)
    assert held == round(row.state * size)


@each_method
def test_uplink_and_downlink_make_up_what_is_sent(name: str) -> None:
    """Uplink and downlink send N - 1 of N parts each, or a worker sends its payload to everybody; nothing else crosses."""
    row = method_table._row(name, N, SHAPE)
    collective = registry.METHODS[name].collectives[0]
    if collective == "all_gather":
        assert row.downlink == 0
        np.testing.assert_allclose(row.sent, (N - 1) * row.uplink, rtol=1e-3)
    else:
        np.testing.assert_allclose(row.sent, (N - 1) / N * (row.uplink + row.downlink), rtol=0.01, atol=0.02)


@each_method
def test_every_collective_that_is_listed_can_be_taken(name: str) -> None:
    method, params = registry.METHODS[name], {"w": np.zeros((48, 64), np.float32)}
    takes = inspect.signature(method.make).parameters
    if "collective" not in takes:
        others = {"recursive_doubling"} if "algorithm" in takes else set()
        assert set(method.collectives[1:]) == others
        return
    gradient = {"w": jax.ShapeDtypeStruct((N, 48, 64), np.float32)}
    for collective in method.collectives:
        tx = method.build(axis_name="data", collective=collective)
        update = jax.vmap(lambda g, tx=tx: tx.update(g, tx.init(params), params)[0], axis_name="data")
        assert jax.eval_shape(update, gradient)["w"].shape == (N, 48, 64)
    for collective in {"all_gather", "two_phase", "all_reduce", "recursive_doubling"} - set(method.collectives):
        with pytest.raises(ValueError, match=f"collective='{collective}'"):
            jax.eval_shape(method.build(axis_name="data", collective=collective).init, params)


UNBIASED = [name for name, method in registry.METHODS.items() if not method.biased]


@pytest.mark.parametrize("name", slow_but(("terngrad",), UNBIASED))
def test_what_is_called_unbiased_is(name: str) -> None:
    """The mean of many draws is the mean gradient, within five standard errors of it."""
    options = {"clip": None} if name == "terngrad" else {}
    method, params, draws = registry.METHODS[name], {"w": np.zeros((24, 128), np.float32)}, 200
    gradient = np.asarray(np.random.default_rng(1).standard_normal((4, 24, 128)), np.float32)
    takes_key = "key" in inspect.signature(method.make).parameters

    def once(key, g):
        tx = method.build(axis_name="data", **options, **({"key": key} if takes_key else {}))
        return tx.update({"w": g}, tx.init(params), params)[0]["w"]

    mapped = jax.vmap(jax.vmap(once, axis_name="data", in_axes=(None, 0)), in_axes=(0, None))
    seen = np.asarray(jax.jit(mapped)(jax.random.split(jax.random.key(2), draws), gradient)[:, 0], np.float64)
    want = np.asarray(gradient, np.float64).mean(axis=0)
    error = seen.std(axis=0).mean() / np.sqrt(draws)
    # Rounded to the nearest bfloat16, on the uplink and on the downlink.
    rounding = 2**-8 if name == "dense_bf16" else 1e-6
    assert np.abs(seen.mean(axis=0) - want).mean() < error + rounding
    assert np.abs(seen.mean(axis=0) - want).max() < 6 * max(seen.std(axis=0).max() / np.sqrt(draws), rounding)


@pytest.mark.parametrize("name", [n for n, m in registry.METHODS.items() if m.kept == "nothing" and m.biased])
def test_what_is_biased_and_keeps_nothing_is_a_sign(name: str) -> None:
    """A bias that no memory makes up for has to be the method's very idea."""
    assert registry.METHODS[name].update == "sign"


def test_the_table_needs_two_workers() -> None:
    with pytest.raises(ValueError, match="workers must be at least 2, got 1"):
        method_table.table(workers=1)


def test_public_names_are_the_registered_ones() -> None:
    for method in registry.METHODS.values():
        assert getattr(gc, method.make.__name__) is method.make
        assert method.make.__doc__
