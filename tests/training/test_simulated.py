"""Workers that share a device train as workers on devices of their own, and know what those would send."""

import jax
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.methods.registry import METHODS
from gradcomp_jax.training.simulated import make_simulated_step, sent_program, simulated_state
from tests.conformance.methods import FEW
from tests.training import problem

WORKERS, STEPS = 4, 3


def compare(tx: optax.GradientTransformation, *, replicas: bool = False) -> None:
    mesh = problem.mesh_of(WORKERS)
    placed = gc.init_state(problem.params(), tx, mesh, replicas=replicas)
    shared = simulated_state(problem.params(), tx, WORKERS, replicas=replicas)
    assert jax.tree.structure(shared) == jax.tree.structure(placed)
    assert jax.tree.map(np.shape, shared) == jax.tree.map(np.shape, placed)
    first = problem.batch(0)
    compiled = gc.make_train_step(problem.loss, tx, mesh).lower(placed, problem.on(mesh, first)).compile()
    step = make_simulated_step(problem.loss, tx, WORKERS)
    sends = sent_program(problem.loss, tx, WORKERS, shared, first)
    assert gc.wire_bytes(sends, branch=-1).sent == gc.wire_bytes(compiled, branch=-1).sent > 0
    for i in range(STEPS):
        batch = problem.batch(i)
        placed, metrics = compiled(placed, problem.on(mesh, batch))
        shared, same = step(shared, batch)
        np.testing.assert_allclose(same["loss"], metrics["loss"], rtol=1e-4)
    assert int(shared.step) == STEPS
    for one, other in zip(jax.tree.leaves(shared.params), jax.tree.leaves(placed.params), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("method", [method for method in METHODS if method in FEW])
def test_a_method_trains_alike_and_its_bytes_are_the_same(method):
    compare(optax.chain(METHODS[method].build(axis_name="data"), optax.sgd(0.05)))


def test_replicas_differ_as_those_on_devices_do():
    outer = gc.local_sgd(gc.dense(axis_name="data"), axis_name="data", every=2)
    compare(optax.chain(optax.sgd(0.05), outer), replicas=True)


def test_parameters_of_the_caller_are_not_donated():
    params = jax.tree.map(jax.numpy.asarray, problem.params())
    tx = optax.chain(gc.terngrad(axis_name="data"), optax.sgd(0.05))
    make_simulated_step(problem.loss, tx, 2)(simulated_state(params, tx, 2), problem.batch(0))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
