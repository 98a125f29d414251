"""Another method in the middle of a run: what is not the method's goes on, and a state of another one is told as such."""

import warnings

import jax
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState as FlaxState
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc
from tests.training.problem import batch, loss, mesh_of, on
from tests.training.test_carried import batch as linear_batch
from tests.training.test_carried import exchange_of, kept, seen
from tests.training.test_carried import fresh as linear_state
from tests.training.test_carried import loss as linear

pytestmark = pytest.mark.standard_promotion

PARAMS = {"w": np.full((12, 8), 0.1, np.float32), "v": np.full((8, 2), 0.2, np.float32), "b": np.zeros(8, np.float32)}


def wire(name: str, **options):
    return getattr(gc, name)(axis_name="data", **options)


def topk(**options):
    return wire("topk_sgd", **{"density": 0.125, "block": 16, **options})


def chain(method, *before):
    return optax.chain(*before, method, optax.adam(0.01))


def made(tx, workers: int = 2):
    return gc.init_state(PARAMS, tx, mesh_of(workers))


def run(tx, state, seeds, workers: int = 2):
    mesh = mesh_of(workers)
    step = gc.make_train_step(loss, tx, mesh)
    for seed in seeds:
        state, metrics = step(state, on(mesh, batch(seed)))
    return state, metrics


def adam_of(state) -> optax.ScaleByAdamState:
    (found,) = gc.per_device.nodes_within(state, lambda node: isinstance(node, optax.ScaleByAdamState))
    return found


def same(found, wanted) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.slow
def test_parameters_counts_and_moments_go_on() -> None:
    old = chain(topk())
    state, _ = run(old, made(old), (0, 1, 2))
    snapshot = jax.tree.map(np.asarray, state)
    new = chain(wire("terngrad"), optax.clip_by_global_norm(1.0))
    with pytest.warns(
        UserWarning, match=r"memories of gradcomp_jax.topk_sgd do not fit gradcomp_jax.terngrad: .* of norm"
    ):
        replaced = gc.replace_method(state, new, mesh_of(2))
    assert jax.tree.structure(replaced) == jax.tree.structure(made(new))
    same(replaced.params, snapshot.params)
    same(adam_of(replaced), adam_of(snapshot))
    assert int(replaced.step) == int(exchange_of(replaced).step) == int(adam_of(replaced).count) == 3
    assert jax.tree.map(lambda a: a.sharding, replaced) == jax.tree.map(lambda a: a.sharding, made(new))
    after, metrics = run(new, replaced, (3, 4))
    assert int(after.step) == 5 and np.isfinite(float(metrics["loss"]))


ALIKE = {
    "block_quantized": lambda: wire("block_quantized"),
    "topk_sgd": lambda: topk(collective="all_gather", block=512),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALIKE)
def test_what_one_method_owes_another_one_sends(name: str) -> None:
    """Updates and what is kept are all gradients, before the change and after the next step of the new method."""
    mesh, last = mesh_of(8), optax.chain(ALIKE[name](), optax.sgd(1.0))
    state = linear_state(topk(), 8)
    step = gc.make_train_step(linear, optax.chain(topk(), optax.sgd(1.0)), mesh)
    for seed in (0, 1, 2):
        state, _ = step(state, on(mesh, linear_batch(seed)))
    assert any(np.any(x) for x in jax.tree.leaves(exchange_of(state).server))
    owed = kept(state, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replaced = gc.replace_method(state, last, mesh)
    for k, value in kept(replaced, 8).items():
        np.testing.assert_allclose(value, owed[k], atol=3e-6)
    replaced, _ = gc.make_train_step(linear, last, mesh)(replaced, on(mesh, linear_batch(3)))
    for k, value in kept(replaced, 8).items():
        total = seen((0, 1, 2, 3))[k].reshape(-1)
        np.testing.assert_allclose(value - np.asarray(replaced.params[k]).reshape(-1), total, atol=2e-5)


@pytest.mark.slow
def test_a_scale_and_master_weights_around_it_go_on() -> None:
    narrow = jax.tree.map(lambda p: p.astype(np.float16), PARAMS)
    txs = [gc.dynamic_loss_scale(gc.master_weights(chain(wire(name)))) for name in ("terngrad", "dense")]
    state = gc.init_state(narrow, txs[0], mesh_of(2))
    scale, inner = state.opt_state.scale, state.opt_state.inner
    marked = state._replace(
        opt_state=state.opt_state._replace(
            scale=scale / 4, inner=inner._replace(master=jax.tree.map(lambda x: x + 1, inner.master))
        )
    )
    replaced = gc.replace_method(marked, txs[1], mesh_of(2))
    assert float(gc.loss_scale(replaced.opt_state)) == float(scale) / 4
    same(replaced.opt_state.inner.master, marked.opt_state.inner.master)
    assert exchange_of(replaced).made_by.name == "dense"


@pytest.mark.slow
def test_states_of_flax_and_of_the_optimizer_alone() -> None:
    mesh = mesh_of(2)
    old, new = (gc.unreduced(chain(wire(name)), mesh) for name in ("terngrad", "dense"))
    state = FlaxState.create(apply_fn=None, params=PARAMS, tx=old)
    state = state.replace(step=7, opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))
    replaced = gc.replace_method(state, new, mesh)
    assert replaced.step == 7 and replaced.tx is new
    same(adam_of(replaced.opt_state), adam_of(state.opt_state))
    alone = gc.replace_method(state.opt_state, chain(wire("dense")), mesh, params=PARAMS)
    same(alone, replaced.opt_state)
    with pytest.raises(ValueError, match="pass params="):
        gc.replace_method(state.opt_state, chain(wire("dense")), mesh)


@pytest.mark.slow
def test_replicas_are_consolidated_first() -> None:
    tx = optax.chain(optax.adam(0.1), gc.local_sgd(wire("dense"), axis_name="data", every=2))
    state = gc.init_state(PARAMS, tx, mesh_of(2), replicas=True)
    with pytest.raises(ValueError, match="make one set with"):
        gc.replace_method(state, chain(wire("dense")), mesh_of(2))


OTHERS = {
    "another": (
        lambda: wire("dgc"),
        lambda: wire("terngrad"),
        "by gradcomp_jax.dgc, and is given to gradcomp_jax.terngrad",
    ),
    "of two links": (lambda: wire("powersgd"), lambda: wire("dgc"), "made by gradcomp_jax.powersgd, and is given to"),
    "exchanges": (
        lambda: gc.exchange(gc.compressors.ternary(), axis_name="data"),
        lambda: gc.exchange(gc.compressors.topk(0.1), axis_name="data"),
        r"exchange\(compressor=.*, memory=Residual\), and is given to gradcomp_jax.exchange\(compressor=TopK",
    ),
    "accumulated": (
        topk,
        lambda: gc.accumulate(topk(), axis_name="data", every=2),
        "is given to gradcomp_jax.accumulate",
    ),
    "nothing": (optax.identity, lambda: wire("dense"), "something without an exchange"),
}


@pytest.mark.parametrize(
    ("name", "door"),
    [*((name, "make_train_step") for name in OTHERS), ("another", "unreduced"), ("exchanges", "shard_map")],
)
def test_a_state_of_another_method_is_told_as_such(name: str, door: str) -> None:
    before, now, sentence = OTHERS[name]
    mesh, tx = mesh_of(2), chain(now())
    state = jax.eval_shape(lambda: gc.init_state(PARAMS, chain(before()), mesh))
    data = batch(0)

    def update(opt_state, data):
        value_and_grad = gc.local_value_and_grad(loss, axis_name="data")
        return tx.update(value_and_grad(PARAMS, data)[1], opt_state, PARAMS)

    def outside(opt_state, data):
        value_and_grad = gc.local_value_and_grad(loss, axis_name="data", mesh=mesh)
        return gc.unreduced(tx, mesh).update(value_and_grad(PARAMS, data)[1], opt_state, PARAMS)

    specs = gc.state_specs(state.opt_state, axis_name="data")
    mapped = jax.shard_map(update, mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs))
    doors = {
        "make_train_step": lambda: gc.make_train_step(loss, tx, mesh).lower(state, data),
        "unreduced": lambda: jax.eval_shape(outside, state.opt_state, data),
        "shard_map": lambda: jax.eval_shape(mapped, state.opt_state, data),
    }
    with pytest.raises(ValueError, match=rf"you changed the method: .*({sentence}).*gradcomp_jax.replace_method"):
        doors[door]()


def test_a_replica_meeting_is_no_exchange_of_gradients() -> None:
    meeting = gc.local_sgd(wire("dense"), axis_name="data", every=2)
    exchange = jax.eval_shape(gc.dense(axis_name=None).init, PARAMS)
    with pytest.raises(ValueError, match=r"given to gradcomp_jax.outer_average \(local_sgd"):
        meeting.update(PARAMS, exchange, PARAMS)


@pytest.mark.slow
@pytest.mark.parametrize("options", ({"density": 0.25, "momentum": 0.5}, {"collective": "all_gather"}))
def test_other_options_are_the_same_method(options) -> None:
    state = made(chain(wire("dgc", density=0.125, collective="two_phase")))
    tx = chain(wire("dgc", **{"density": 0.125, "collective": "two_phase", **options}))
    if "collective" not in options:
        jax.eval_shape(gc.make_train_step(loss, tx, mesh_of(2)), state, on(mesh_of(2), batch(0)))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the memories")
        gc.replace_method(state, tx, mesh_of(2))


@pytest.mark.slow
def test_what_no_link_of_the_new_chain_takes_is_named() -> None:
    state = made(chain(wire("terngrad")))
    with pytest.warns(UserWarning, match="takes ScaleByAdamState of the old one"):
        gc.replace_method(state, optax.chain(wire("dense"), optax.sgd(0.1)), mesh_of(2))
