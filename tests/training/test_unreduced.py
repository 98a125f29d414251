"""Plain jit: gradients that nobody has added up go to an exchange without a shard_map of one's own."""

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc
from tests.training.problem import batch, loss, mesh_of, on, params

N = 8
CHAINS = {
    "dgc": lambda: optax.chain(gc.dgc(axis_name="data", density=0.125, block=16), optax.sgd(0.1)),
    "terngrad": lambda: optax.chain(gc.terngrad(axis_name="data", bucket_size=40), optax.sgd(0.05)),
}


def wide_params():
    return jax.tree.map(lambda p: np.asarray(p, np.float32), params())


def train(step, params, opt_state, mesh, steps=3):
    losses = []
    for i in range(steps):
        params, opt_state, value = step(params, opt_state, on(mesh, batch(i)))
        losses.append(float(value))
    return losses, opt_state


def sent(step, *args) -> dict[str, int]:
    return gc.wire_bytes(step.lower(*args).compile()).by("kind")


def marked_step(tx, mesh, micro_batches=1):
    """As the docstring of ``unreduced`` has it."""
    value_and_grad = gc.local_value_and_grad(loss, axis_name="data", mesh=mesh, accumulate=micro_batches)

    @jax.jit
    def step(params, opt_state, batch):
        value, gradient = value_and_grad(params, batch)
        updates, opt_state = tx.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def typed_loss(mesh):
    """JAX adds no ``reduced`` operand to one that is split along its axis: the bias is split first."""

    def loss(p, batch):
        product = batch["x"] @ p["w"]
        bias = jax.reshard(jnp.broadcast_to(p["b"], product.shape), jax.NamedSharding(mesh, P("data")))
        return jnp.mean((jnp.tanh(product + bias) @ p["v"] - batch["y"]) ** 2)

    return loss


def typed_step(tx, mesh, micro_batches=1):
    """On a mesh of Explicit type: the gradient's type says that it is a sum of parts."""

    @jax.jit
    def step(params, opt_state, batch):
        local = jax.reshard(params, jax.NamedSharding(mesh, P(reduced={"data"})))
        value, gradient = 0.0, None
        for i in range(micro_batches):
            part = jax.tree.map(lambda a, i=i: a.reshape(N, micro_batches, -1, *a.shape[1:])[:, i], batch)
            part = jax.tree.map(
                lambda a: a.reshape(-1, *a.shape[2:], out_sharding=jax.NamedSharding(mesh, P("data"))), part
            )
            one, found = jax.value_and_grad(lambda p, d: typed_loss(mesh)(p, d) / micro_batches)(local, part)
            gradient = found if gradient is None else jax.tree.map(jnp.add, gradient, found)
            value += one
        updates, opt_state = tx.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


STEPS = {"marked": (marked_step, False), "marked, explicit mesh": (marked_step, True), "typed": (typed_step, True)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "name"), [("marked", "dgc"), ("marked, explicit mesh", "terngrad"), ("typed", "terngrad")]
)
def test_it_is_the_train_step(form: str, name: str) -> None:
    """The same losses, and the same bytes, the mean of the loss included."""
    make, explicit = STEPS[form]
    mesh = mesh_of(N, explicit=explicit)
    plain = CHAINS[name]()
    state, reference = gc.init_state(wide_params(), plain, mesh), gc.make_train_step(loss, plain, mesh)
    data = on(mesh, batch(0))
    bytes_sent = sent(reference, state, data)
    expected = []
    for i in range(3):
        state, metrics = reference(state, on(mesh, batch(i)))
        expected.append(float(metrics["loss"]))

    tx, placed = gc.unreduced(plain, mesh), jax.device_put(wide_params(), jax.NamedSharding(mesh, P()))
    step, opt_state = make(tx, mesh), tx.init(placed)
    assert jax.tree.structure(opt_state) == jax.tree.structure(state.opt_state)
    assert sent(step, placed, opt_state, data) == bytes_sent
    losses, opt_state = train(step, placed, opt_state, mesh)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(opt_state), jax.tree.leaves(state.opt_state), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("form", ("typed",))
def test_micro_batches_are_exchanged_once(form: str) -> None:
    make, explicit = STEPS[form]
    mesh = mesh_of(N, explicit=explicit)
    tx, placed = gc.unreduced(CHAINS["dgc"](), mesh), jax.device_put(wide_params(), jax.NamedSharding(mesh, P()))
    opt_state, data = tx.init(placed), on(mesh, batch(0))
    one, three = (make(tx, mesh, k) for k in (1, 3))
    alone, together = (sent(step, placed, opt_state, data) for step in (one, three))
    if form == "typed":
        # The loss of each micro-batch is a mean over all workers: a number each, and nothing else.
        losses = [kinds.pop("all-reduce").operand for kinds in (alone, together)]
        assert losses == [4, 12]
    assert alone == together
    np.testing.assert_allclose(
        train(three, placed, opt_state, mesh)[0], train(one, placed, opt_state, mesh)[0], rtol=1e-4
    )


def test_gradients_that_are_added_up_already() -> None:
    for explicit in (False, True):
        mesh = mesh_of(N, explicit=explicit)
        tx, placed = gc.unreduced(CHAINS["dgc"](), mesh), jax.device_put(wide_params(), jax.NamedSharding(mesh, P()))
        opt_state = tx.init(placed)
        with pytest.raises(ValueError, match=r"gradient of 'b' is added up over 'data' already.*local_value_and_grad"):
            jax.jit(lambda p, s, d, tx=tx: tx.update(jax.grad(loss)(p, d), s, p))(placed, opt_state, on(mesh, batch(0)))


def test_inside_the_axis() -> None:
    mesh = mesh_of(N)
    tx = gc.unreduced(CHAINS["dgc"](), mesh)
    with pytest.raises(ValueError, match=r"that axis is mapped already.*use the chain without it"):
        gc.init_state(wide_params(), tx, mesh)


def test_a_chain_without_an_exchange() -> None:
    mesh = mesh_of(N)
    tx = gc.unreduced(optax.sgd(0.1), mesh)
    placed = wide_params()
    with pytest.raises(ValueError, match=r"no exchange averages its gradient"):
        marked_step(tx, mesh)(placed, tx.init(placed), on(mesh, batch(0)))


def test_flax_creates_a_state_with_it() -> None:
    """TrainState.create calls tx.init, and apply_gradients tx.update, outside of the axis."""
    mesh = mesh_of(N)
    tx = gc.unreduced(CHAINS["dgc"](), mesh)
    state = flax.training.train_state.TrainState.create(apply_fn=None, params=wide_params(), tx=tx)
    value_and_grad = gc.local_value_and_grad(loss, axis_name="data", mesh=mesh)

    @jax.jit
    def step(state, batch):
        value, gradient = value_and_grad(state.params, batch)
        return state.apply_gradients(grads=gradient), value

    losses = []
    for _ in range(3):
        state, value = step(state, on(mesh, batch(0)))
        losses.append(float(value))
    assert losses[2] < losses[0]
    assert int(state.step) == 3
    assert gc.diagnostics(state.opt_state)["exchange/steps"] == 3


def test_keys_and_scalars_among_the_arguments() -> None:
    """A key is folded with the worker; a scalar goes to all; aux is the workers' mean or maximum, in its own dtype."""
    mesh = mesh_of(4)

    def noisy(p, x, temperature, key, *, rngs):
        drawn = jax.random.uniform(key) + jax.random.uniform(rngs)
        return jnp.mean(x * p) * temperature + drawn * p, {"drawn": drawn, "count": jnp.int32(7), "all": x.min() > -1}

    kinds = {"drawn": "mean", "count": "max", "all": "max"}
    value_and_grad = jax.jit(gc.local_value_and_grad(noisy, axis_name="data", has_aux=True, aux=kinds, mesh=mesh))
    x, key = np.zeros((8, 2), np.float32), jax.random.key(3)
    (value, aux), gradient = value_and_grad(jnp.float32(1), on(mesh, x), jnp.float32(2), key, rngs=jax.random.key(4))
    own = [
        jax.random.uniform(jax.random.fold_in(key, i)) + jax.random.uniform(jax.random.fold_in(jax.random.key(4), i))
        for i in range(4)
    ]
    np.testing.assert_allclose(gradient.value, own, rtol=1e-6)
    np.testing.assert_allclose(value, np.mean(own), rtol=1e-6)
    np.testing.assert_allclose(aux["drawn"], np.mean(own), rtol=1e-6)
    assert aux["count"] == 7 and aux["count"].dtype == jnp.int32
    assert bool(aux["all"]) and aux["all"].dtype == jnp.bool_
