"""What is logged of a state is what the state has."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from tests.training.problem import batch, loss, mesh_of, on, params

N = 8


def stepped(tx: optax.GradientTransformation, *, bad: bool = False, **options: Any) -> Any:
    mesh = mesh_of(N)
    state, step = gc.init_state(params(), tx, mesh, **options), gc.make_train_step(loss, tx, mesh)
    for number in range(3):
        data = jax.tree.map(np.array, batch(number))
        if bad and number == 1:
            data = jax.tree.map(lambda x: np.full_like(x, np.nan) if np.issubdtype(x.dtype, np.floating) else x, data)
        state, _ = step(state, on(mesh, data))
    return state


def test_of_an_exchange() -> None:
    state = stepped(optax.chain(gc.dgc(axis_name="data", density=0.25, block=16), optax.sgd(0.1)), bad=True)
    found = gc.diagnostics(state)
    assert set(found) == {f"exchange/{name}" for name in ("steps", "skipped", "memory_ratio", "memory_ratio_max")}
    assert all(value.shape == () and value.dtype == np.float32 for value in found.values())
    assert (float(found["exchange/steps"]), float(found["exchange/skipped"])) == (3, 1)
    assert 0 < float(found["exchange/memory_ratio"]) <= float(found["exchange/memory_ratio_max"])
    jitted = jax.jit(gc.diagnostics)(state.opt_state)
    assert {name: float(value) for name, value in jitted.items()} == pytest.approx(
        {k: float(v) for k, v in found.items()}
    )


def test_bytes_are_those_of_the_report() -> None:
    tx = gc.dense(axis_name="data")
    report = gc.wire_bytes(gc.lower_update({"w": np.zeros((4, 4), np.float32)}, tx, mesh_of(2)).compile())
    assert report.sent == gc.diagnostics(tx.init({"w": np.zeros((4, 4))}), wire=report)["wire/bytes_per_step"] > 0


def test_of_a_moving_density() -> None:
    exchange = gc.density_schedule((0.125, 0.25), schedule=lambda step: 0.25, axis_name="data")
    found = gc.diagnostics(stepped(optax.chain(exchange, optax.sgd(0.1))))
    assert float(found["density/level"]) == 1
    assert np.isnan(found["density/selection_error"])
    assert float(found["exchange/steps"]) == 3


def test_of_replicas() -> None:
    tx = optax.chain(optax.sgd(0.1), gc.local_sgd(gc.dense(axis_name="data"), axis_name="data", every=2))
    state = stepped(tx, replicas=True)
    found = jax.jit(lambda s: gc.diagnostics(s, spread=True))(state)
    assert float(found["replicas/staleness"]) == float(jax.jit(gc.staleness)(state)) == 1
    assert float(found["replicas/dropped"]) == 0
    assert float(found["replicas/spread"]) == pytest.approx(float(jax.jit(gc.replica_spread)(state)))
    assert float(found["replicas/spread"]) > 0
    assert "replicas/spread" not in gc.diagnostics(state)


def test_of_several_exchanges() -> None:
    tx = optax.chain(gc.dense(axis_name="data"), optax.sgd(0.1))
    both = (stepped(tx).opt_state, stepped(tx, bad=True).opt_state)
    found = gc.diagnostics(both)
    assert (float(found["exchange/skipped"]), float(found["exchange_1/skipped"])) == (0, 1)


def test_of_nothing() -> None:
    with pytest.raises(ValueError, match="there is no exchange and no method"):
        gc.diagnostics(optax.adam(1e-3).init(params()))
