"""A bad gradient costs a replica one step, whatever optimizer it has."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc

N = 4
HUGE = 3.0
"""A first entry with which a batch's gradient is finite, and far too large."""

INNER = {"momentum": lambda: optax.sgd(0.05, momentum=0.9), "adam": lambda: optax.adam(0.01)}
METHODS = {
    "local_sgd": lambda: gc.local_sgd(gc.dense(axis_name="data"), axis_name="data", every=2),
    "diloco": lambda: gc.diloco(gc.dense(axis_name="data"), axis_name="data", every=2),
    "late": lambda: gc.diloco(gc.dense(axis_name="data"), axis_name="data", every=4, delay=2, mix=0.5),
    "sparse_loco": lambda: gc.sparse_loco(axis_name="data", every=2, chunk=16),
    "elastic_average": lambda: gc.elastic_average(gc.dense(axis_name="data"), axis_name="data", every=2),
    "gossip": lambda: gc.gossip(axis_name="data"),
}


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) - 0.5) ** 2) * jnp.where(x[0, 0] == HUGE, 1e25, 1.0)


def train(method: str, inner: str, bad_steps: set[int], bad_workers: slice, bad: float = np.nan):
    mesh = jax.make_mesh((N,), ("data",), devices=jax.devices()[:N])
    tx = optax.chain(INNER[inner](), METHODS[method]())
    params = {"w": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)}
    state, step = gc.init_state(params, tx, mesh, replicas=True), gc.make_train_step(loss, tx, mesh)
    losses = []
    for i in range(8):
        x = np.random.default_rng(1).normal(size=(N, 4, 8)).astype(np.float32)
        if i in bad_steps:
            x[bad_workers, 0, 0] = bad
        state, metrics = step(state, jax.device_put(x.reshape(-1, 8), gc.data_sharding(mesh)))
        losses.append(float(metrics["loss"]))
    return state, metrics, losses


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("bad", "method", "inner"),
    [
        (np.nan, "diloco", "adam"),
        (np.nan, "gossip", "momentum"),
        (HUGE, "gossip", "momentum"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (np.nan, "local_sgd", "momentum"),
                (np.nan, "late", "momentum"),
                (HUGE, "elastic_average", "momentum"),
                (np.nan, "sparse_loco", "adam"),
                (HUGE, "diloco", "adam"),
            )
        ),
    ],
)
def test_one_bad_step_of_one_worker(bad: float, method: str, inner: str) -> None:
    state, metrics, losses = train(method, inner, {2}, slice(1, 2), bad)
    if inner == "adam" and bad == HUGE:
        # Adam divides the gradient by its own size: it takes an ordinary step, or squares overflow and it takes none.
        assert np.isfinite(losses[3:]).all()
        return
    assert metrics["dropped"] == 1 / N
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    # What the replica's optimizer does afterwards is that of a replica which never saw the bad step, so all go on.
    assert np.isfinite(losses[3:]).all() and losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_a_bad_step_of_all_workers_is_told_and_training_goes_on() -> None:
    state, metrics, losses = train("diloco", "adam", {2, 3}, slice(None))
    assert metrics["dropped"] == 2
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    assert losses[-1] < losses[0]
