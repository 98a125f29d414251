"""A state of another chain than the one it is given to, and wrappers of optax that do not go around an exchange."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax import contrib

import gradcomp_jax as gc
from tests.training.problem import mesh_of

N = 2
X = np.ones((N, 8), np.float32)
PARAMS = {"w": np.ones((8, 8), np.float32), "b": np.zeros(8, np.float32)}
ALL, SOME = {"w": True, "b": True}, {"w": True, "b": False}


def loss(p: Any, x: Any) -> Any:
    return jnp.mean((x @ p["w"] + p["b"]) ** 2)


def exchange() -> optax.GradientTransformation:
    return gc.topk_sgd(axis_name="data", density=0.25, block=16)


def chain(*more: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(exchange(), *(more or (optax.sgd(0.1),)))


def labelled(labels: dict[str, str]) -> optax.GradientTransformation:
    return chain(optax.multi_transform({"a": optax.adam(0.1), "z": optax.set_to_zero()}, labels))


def by_step(tx: Any, then: Any, replicas: bool = False) -> None:
    mesh = mesh_of(N)
    state = jax.eval_shape(lambda: gc.init_state(PARAMS, tx, mesh, replicas=replicas))
    gc.make_train_step(loss, then, mesh).lower(state, X)


def by_replicas(tx: Any, then: Any) -> None:
    by_step(tx, then, replicas=True)


def by_unreduced(tx: Any, then: Any) -> None:
    mesh = mesh_of(N)

    def all_of_it(x: Any) -> Any:
        state = gc.unreduced(tx, mesh).init(PARAMS)
        gradient = gc.local_value_and_grad(loss, axis_name="data", mesh=mesh)(PARAMS, x)[1]
        return gc.unreduced(then, mesh).update(gradient, state, PARAMS)

    jax.eval_shape(all_of_it, X)


def by_loop(tx: Any, then: Any) -> None:
    mesh = mesh_of(N)

    def all_of_it(x: Any) -> Any:
        state, specs = gc.init_opt_state(PARAMS, tx, mesh)

        def step(state: Any, x: Any) -> Any:
            return then.update(gc.local_value_and_grad(loss, axis_name="data")(PARAMS, x)[1], state, PARAMS)

        return jax.shard_map(step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs))(state, x)

    jax.eval_shape(all_of_it, X)


DOORS = [by_step, *(pytest.param(door, marks=pytest.mark.slow) for door in (by_replicas, by_unreduced))]

CHAINS = {
    "a mask around all": (chain, lambda: optax.masked(chain(), ALL), r"a mask or labels"),
    "a mask around the exchange": (chain, lambda: optax.chain(optax.masked(exchange(), ALL), optax.sgd(0.1)), "a mask"),
    "no mask any more": (
        lambda: optax.chain(optax.masked(gc.dgc(axis_name="data"), ALL), optax.sgd(0.1)),
        lambda: optax.chain(gc.dgc(axis_name="data"), optax.sgd(0.1)),
        r"a mask, labels or the chain: the state of gradcomp_jax\.dgc lies inside",
    ),
    "labels of the optimizer": (
        lambda: labelled({"w": "a", "b": "a"}),
        lambda: labelled({"w": "a", "b": "z"}),
        r"a mask or labels: this state has an array \[8\] at '1/inner_states/a/.*MaskedNode",
    ),
    "other labels": (
        lambda: labelled({"w": "a", "b": "a"}),
        lambda: chain(optax.multi_transform({"c": optax.adam(0.1)}, {"w": "c", "b": "c"})),
        r"a mask or labels: this state has 'a', 'z' by name",
    ),
    "a longer chain": (
        chain,
        lambda: chain(optax.clip(1.0), optax.sgd(0.1)),
        r"the chain: this state is of one of 2 transf.* one of 3",
    ),
    "a shorter chain": (lambda: chain(optax.clip(1.0), optax.sgd(0.1)), chain, r"the chain: .*of 3 transf.* one of 2"),
    "a longer optimizer": (lambda: chain(optax.adam(0.1)), lambda: chain(optax.adamw(0.1)), r"the chain: .* at '1'"),
    "another optimizer": (chain, lambda: chain(optax.adam(0.1)), r"the optimizer: this state has EmptyState at '1/0'"),
    "hyperparameters": (
        chain,
        lambda: chain(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)),
        r"the optimizer: .*InjectStatefulHyperparamsState",
    ),
}


@pytest.mark.parametrize(
    ("name", "door"),
    [*((name, by_step) for name in CHAINS), ("a shorter chain", by_replicas), ("a mask around all", by_unreduced)],
)
def test_a_state_of_another_chain_is_told_as_such(name: str, door: Callable[..., None]) -> None:
    before, now, sentence = CHAINS[name]
    with pytest.raises(ValueError, match=rf"you changed {sentence}.*gradcomp_jax\.replace_method\(state, tx, mesh\)"):
        door(before(), now())


@pytest.mark.parametrize("wrapper", ["inner_state", "hyperparams"])
def test_in_a_loop_of_ones_own_a_wrapper_around_the_exchange_alone(wrapper: str) -> None:
    around = {
        "inner_state": lambda: optax.masked(exchange(), ALL),
        "hyperparams": lambda: optax.inject_hyperparams(lambda of: exchange())(of=0.1),
    }[wrapper]
    sentence = r"around the exchange: .*gradcomp_jax\.topk_sgd alone.*gradcomp_jax\.replace_method"
    with pytest.raises(AttributeError, match=sentence):
        by_loop(chain(), optax.chain(around(), optax.sgd(0.1)))
    with pytest.raises(ValueError, match=r"you changed .*gradcomp_jax\.replace_method"):
        by_loop(optax.chain(around(), optax.sgd(0.1)), chain())


def test_a_state_says_of_other_names_what_any_object_does() -> None:
    state = jax.eval_shape(exchange().init, PARAMS)
    assert not hasattr(state, "inner_state")
    with pytest.raises(AttributeError, match=r"'ExchangeState' object has no attribute 'velocity'"):
        _ = state.velocity


def test_a_fault_in_the_chain_itself_is_left_as_it_is() -> None:
    def fails(updates: Any, state: Any, params: Any = None) -> Any:
        raise ValueError("the user's own words")

    tx = chain(optax.GradientTransformation(optax.sgd(0.1).init, fails))
    for door in (by_step, by_unreduced):
        with pytest.raises(ValueError, match=r"^the user's own words(?!.*replace_method)"):
            door(tx, tx)


def test_other_parameters_than_the_moments_are_of() -> None:
    mesh, tx = mesh_of(N), chain(optax.masked(optax.adam(0.1), SOME))
    state = jax.eval_shape(lambda: gc.init_state(PARAMS, tx, mesh))
    moments = state.opt_state[1].inner_state[0]
    moments = moments._replace(mu={**moments.mu, "w": jax.ShapeDtypeStruct((8, 4), np.float32)})
    state = state._replace(opt_state=(state.opt_state[0], optax.MaskedState((moments, optax.EmptyState()))))
    with pytest.raises(ValueError, match=r"of other parameters: it has the shape \(8, 4\) at '1/inner_state/0/mu/w'"):
        gc.make_train_step(loss, tx, mesh).lower(state, X)


def lookahead(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.lookahead(inner, sync_period=2, slow_step_size=0.5)


@pytest.mark.parametrize("door", [by_step, by_loop])
def test_lookahead_needs_its_own_parameters(door: Callable[..., None]) -> None:
    for tx in (lookahead(chain()), chain(lookahead(optax.sgd(0.1)))):
        with pytest.raises(ValueError, match=r"optax\.lookahead moves two sets.*init_synced.*params\.fast"):
            door(tx, tx)


def test_lookahead_in_a_train_step_and_beside_an_exchange() -> None:
    both, mesh = optax.LookaheadParams.init_synced(PARAMS), mesh_of(N)
    state = jax.eval_shape(lambda: gc.init_state(both, lookahead(chain()), mesh))
    with pytest.raises(ValueError, match=r"a train step, which differentiates all parameters, has no place for it"):
        gc.make_train_step(lambda p, x: loss(p.fast, x), lookahead(chain()), mesh).lower(state, X)
    with pytest.raises(ValueError, match=r"put the exchange inside, optax\.lookahead\(optax\.chain\(exchange"):
        jax.eval_shape(lambda: gc.init_state(both, chain(lookahead(optax.sgd(0.1))), mesh))


@pytest.mark.standard_promotion
def test_lookahead_in_a_loop_of_ones_own_is_that_of_one_worker() -> None:
    both, mesh = optax.LookaheadParams(PARAMS, PARAMS), mesh_of(N)
    tx = gc.unreduced(lookahead(optax.chain(gc.dense(axis_name="data"), optax.sgd(0.1))), mesh)
    alone = lookahead(optax.sgd(0.1))
    x = np.arange(N * 8, dtype=np.float32).reshape(N, 8) / 8

    def steps(params: Any, tx: Any, find: Callable[..., Any]) -> Any:
        state = tx.init(params)
        for _ in range(3):
            updates, state = tx.update(find(params.fast, x), state, params)
            params = optax.apply_updates(params, updates)
        return params

    ours = gc.local_value_and_grad(loss, axis_name="data", mesh=mesh)
    found = jax.jit(lambda p: steps(p, tx, lambda *args: ours(*args)[1]))(both)
    expected = jax.jit(lambda p: steps(p, alone, jax.grad(loss)))(both)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
    wrong = jax.tree.map(np.zeros_like, both)
    state = jax.eval_shape(tx.init, both)
    with pytest.raises(ValueError, match=r"the gradient of gradcomp_jax\.local_value_and_grad.*params\.fast, batch"):
        jax.eval_shape(tx.update, wrong, state, both)


def test_multi_steps_around_an_exchange() -> None:
    tx = optax.MultiSteps(chain(), 2).gradient_transformation()
    with pytest.raises(ValueError, match=r"^optax\.MultiSteps around an exchange.*gradcomp_jax\.accumulate"):
        by_step(tx, tx)


@pytest.mark.parametrize("door", DOORS)
def test_a_line_search_evaluates_the_loss_itself(door: Callable[..., None]) -> None:
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=2)
    with pytest.raises(TypeError, match=r"'value_fn'.*a line search.*linesearch=None"):
        door(chain(search), chain(search))


def test_what_reads_the_loss_is_given_it_by_hand_outside_a_step() -> None:
    tx = chain(optax.polyak_sgd())
    with pytest.raises(TypeError, match=r"'value': .*tx\.update\(gradient, state, params, value=loss\)"):
        by_unreduced(tx, tx)


@pytest.mark.parametrize("door", [by_step, by_unreduced])
def test_what_reads_each_workers_gradient_around_an_exchange_goes_after_it(door: Callable[..., None]) -> None:
    around = contrib.mechanize(chain())
    with pytest.raises(ValueError, match=r"goes after it: optax\.chain\(exchange, sam"):
        door(around, around)


def test_an_optimizer_without_extra_arguments_in_unreduced() -> None:
    sam = chain(contrib.sam(optax.sgd(0.1), contrib.normalize(), sync_period=2))
    with pytest.raises(TypeError, match=r"what optax calls extra arguments.*optax\.GradientTransformation\(tx\.init"):
        by_unreduced(sam, sam)
