"""Losses whose loops and branches begin with constants, which JAX's tracking of what differs by worker refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental.ode import odeint
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc
from tests.training.problem import mesh_of

N, MINE = 4, 6
"""Workers, and examples of each."""

PARAMS = {
    "w": (np.random.default_rng(0).normal(size=(16, 16)) / 4).astype(np.float32),
    "v": (np.random.default_rng(1).normal(size=(16, 2)) / 4).astype(np.float32),
}
X = np.random.default_rng(2).normal(size=(N * MINE, 16)).astype(np.float32)
BATCH = (X, X[:, :2] * X[:, 2:4])


def head(hidden, p, batch):
    return jnp.mean((hidden @ p["v"] - batch[1]) ** 2)


def plain(p, batch):
    return head(jnp.tanh(batch[0] @ p["w"]), p, batch)


def scan(p, batch):
    def cell(h, _):
        return jnp.tanh(h @ p["w"] + batch[0]), None

    return head(lax.scan(cell, jnp.zeros(batch[0].shape), None, length=3)[0], p, batch)


def while_loop(p, batch):
    def halve(carry):
        return carry[0] / 2, carry[1] + 1

    _, steps = lax.while_loop(lambda c: c[0] > 1, halve, (jnp.abs(batch[0]).max(), 0))
    return head(jnp.tanh(batch[0] @ p["w"]) * steps.astype(jnp.float32), p, batch)


def cond(p, batch):
    x = batch[0]
    return head(lax.cond(x.sum() > 0, lambda: jnp.tanh(x @ p["w"]), lambda: jnp.zeros(x.shape)), p, batch)


@jax.custom_vjp
def saturated(x):
    return jnp.clip(x, -1.0, 1.0)


saturated.defvjp(lambda x: (saturated(x), None), lambda _, g: (jnp.full(g.shape, 0.25),))


def custom_vjp(p, batch):
    return head(saturated(batch[0] @ p["w"]), p, batch)


def ode(p, batch):
    times = jnp.array([0.0, 0.5, 1.0])
    path = odeint(lambda h, _: jnp.tanh(h @ p["w"] + batch[0]), jnp.zeros(batch[0].shape), times)
    return head(path[-1], p, batch)


def rnn(p, batch):
    linen = pytest.importorskip("flax.linen")
    cell = {"i": {"kernel": p["w"], "bias": jnp.zeros(16)}, "h": {"kernel": p["w"]}}
    hidden = linen.RNN(linen.SimpleCell(16)).apply({"params": {"cell": cell}}, batch[0].reshape(2, -1, 16))
    return head(hidden.reshape(-1, 16), p, batch)


QUICK = (scan, cond, custom_vjp)
SLOW = (while_loop, ode, rnn)
REFUSED = [*QUICK, *(pytest.param(loss, marks=pytest.mark.slow) for loss in SLOW)]


def placed(mesh, tree=BATCH):
    return jax.device_put(tree, gc.data_sharding(mesh))


def chain(*before):
    return optax.chain(*before, gc.topk_sgd(axis_name="data", density=0.1), optax.sgd(0.1))


@functools.cache
def state_of(kind, workers):
    """A chain and its fresh state."""
    method = gc.topk_sgd(axis_name="data", density=0.1)
    tx = {
        "plain": chain(),
        "halves": chain(halves_added()),
        "weighted": gc.weighted(method, axis_name="data"),
        "bucketed": gc.bucketed(method, bucket_bytes=512),
    }[kind]
    return tx, gc.init_state(PARAMS, tx, mesh_of(workers))


def own_gradients(loss):
    """One a worker, of each worker's part of the batch, without any axis."""
    parts = jax.tree.map(lambda x: x.reshape(N, MINE, *x.shape[1:]), BATCH)
    return jax.jit(lambda p, b: lax.map(functools.partial(jax.grad(loss), p), b))(PARAMS, parts)


def assert_close(found, wanted):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), found, wanted)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("loss", REFUSED, ids=lambda loss: loss.__name__)
def test_a_loss_that_starts_from_constants_has_each_workers_own_gradient(loss):
    mesh = mesh_of(N, explicit=loss is cond)
    _, found = jax.jit(gc.local_value_and_grad(loss, axis_name="data", mesh=mesh))(PARAMS, placed(mesh))
    assert_close({name: mark.value for name, mark in found.items()}, own_gradients(loss))


def test_so_has_it_inside_a_shard_map_of_ones_own():
    mesh = mesh_of(N)

    def worker(p, batch):
        return jax.tree.map(lambda g: g[None], gc.local_value_and_grad(scan, axis_name="data")(p, batch)[1])

    mapped = jax.shard_map(worker, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    assert_close(jax.jit(mapped)(PARAMS, placed(mesh)), own_gradients(scan))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"rngs": 0, "has_aux": True, "accumulate": 2},
        {"weight": lambda batch: lax.fori_loop(0, 2, lambda i, n: n + jnp.abs(batch[0][i, 0]), 0.0)},
    ],
    ids=["accumulate", "weight"],
)
def test_every_option_of_a_train_step_takes_it(options):
    mesh = mesh_of(2)
    tx, state = state_of("weighted" if "weight" in options else "bucketed", 2)

    def loss(p, batch, rngs=None):
        noise = 0.0 if rngs is None else jax.random.normal(rngs, ())
        found = scan(p, batch) + noise
        return (found, {"of the batch": batch[0].sum(), "of none": jnp.zeros(())}) if "has_aux" in options else found

    gc.make_train_step(loss, tx, mesh, **options).trace(state, placed(mesh))


def gradients_of(loss, mesh):
    return jax.jit(gc.local_value_and_grad(loss, axis_name="data", mesh=mesh)).trace(PARAMS, placed(mesh))


def test_a_loss_that_tracking_takes_is_traced_once_and_without_a_program_of_its_own():
    seen = []

    def counted(p, batch):
        seen.append(batch)
        return plain(p, batch)

    gradients_of(counted, mesh_of(2))
    assert len(seen) == 1
    assert "V:data" in str(jax.typeof(seen[0][0]).str_short(True))


def test_what_a_loss_prints_is_in_the_program_once():
    def printing(p, batch):
        jax.debug.print("{}", p["v"][0, 0])
        return scan(p, batch)

    assert str(gradients_of(printing, mesh_of(2)).jaxpr).count("debug_") == 1


def test_a_users_own_error_is_raised_as_it_is():
    def own_type_error(p, batch):
        raise TypeError("of my own")

    def wrong_shapes(p, batch):
        return lax.scan(lambda h, _: (batch[0], None), jnp.zeros(3), None, length=2)[0].sum()

    with pytest.raises(TypeError, match="of my own"):
        gradients_of(own_type_error, mesh_of(2))
    with pytest.raises(TypeError, match="shapes do not match") as raised:
        gradients_of(wrong_shapes, mesh_of(2))
    assert "V:data" not in str(raised.value)


def halves_added():
    """Returns each gradient as it is, by a loop that begins with zeros."""

    def update(updates, state, params=None):
        return jax.tree.map(
            lambda g: lax.fori_loop(0, 2, lambda _, total: total + g / 2, jnp.zeros(g.shape)), updates
        ), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


@pytest.mark.slow
def test_an_optimizer_that_tracking_refuses_is_told_the_option():
    mesh = mesh_of(2)
    tx, state = state_of("halves", 2)
    with pytest.raises(TypeError, match="check_vma=False"):
        gc.make_train_step(plain, tx, mesh).trace(state, placed(mesh))
    _, gradients = jax.jit(gc.local_value_and_grad(plain, axis_name="data", mesh=mesh))(PARAMS, placed(mesh))
    with pytest.raises(TypeError, match="check_vma=False"):
        gc.unreduced(tx, mesh).update(gradients, state.opt_state, PARAMS)
    updates = []
    for kind, options in (("halves", {"check_vma": False}), ("plain", {})):
        given, state = state_of(kind, 2)
        updates.append(jax.jit(gc.unreduced(given, mesh, **options).update)(gradients, state.opt_state, PARAMS)[0])
    assert_close(*updates)


@pytest.mark.slow
def test_the_overlapped_steps_have_the_option_for_an_optimizer():
    mesh, quantizer = mesh_of(2), gc.block_quantized(axis_name="data", bits=4)
    optimizer = optax.chain(halves_added(), optax.sgd(0.1))
    makers = {
        gc.make_overlapped_step: (quantizer, optimizer, mesh),
        gc.make_overlapped_outer_step: (quantizer, optimizer, optax.sgd(0.7), mesh),
    }
    for make, rest in makers.items():
        more = {"delay": 1} if make is gc.make_overlapped_step else {"delay": 1, "every": 2}
        step = make(plain, *rest, **more)
        with pytest.raises(TypeError, match="check_vma=False"):
            step(gc.init_state(PARAMS, step.tx, mesh, replicas=True), placed(mesh))
        step = make(plain, *rest, **more, check_vma=False)
        step(gc.init_state(PARAMS, step.tx, mesh, replicas=True), placed(mesh))
        step.wait()


@pytest.mark.slow
def test_a_loss_along_an_axis_more_is_refused_with_the_remedy():
    """Its derivatives would have to be added up over the other axis, and without tracking nobody does."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])

    def worker(p, batch):
        return gc.local_value_and_grad(scan, axis_name="data")(p, batch)[1]

    both = P(("data", "model"))
    mapped = jax.shard_map(worker, mesh=mesh, in_specs=(P(), both), out_specs=P("data"))
    with pytest.raises(TypeError, match="check_vma=False"):
        jax.jit(mapped).trace(PARAMS, jax.device_put(BATCH, jax.NamedSharding(mesh, both)))
