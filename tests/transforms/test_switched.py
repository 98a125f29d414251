"""Candidates in one program: the law over changes of the choice, each as by itself, bytes by branch, checkpoints, refusals."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.methods.traffic import traffic_of
from tests.conformance.environments import AXIS, means_kept, vmapped
from tests.training import problem

N = 4
PARAMS = {"w": np.zeros((64, 48), np.float32), "b": np.zeros(5, np.float32)}

CANDIDATES = {
    "dense": lambda: gc.dense(axis_name=AXIS),
    "int4": lambda: gc.block_quantized(axis_name=AXIS, bits=4, block=64, error_feedback=True),
    "topk": lambda: gc.topk_sgd(axis_name=AXIS, density=0.05, block=64),
}
ORDER = (1, 2, 2, 0, 1, 2, 0, 2)
"""The candidates of eight steps; each is left and comes back."""

BAD = 4
"""The step with an infinity in it, of the second candidate."""


def made(*names: str) -> dict[str, Any]:
    return {name: CANDIDATES[name]() for name in names or CANDIDATES}


def gradients(step: int, workers: int = N) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    found = {k: rng.normal(size=(workers, *v.shape)).astype(np.float32) for k, v in PARAMS.items()}
    if step == BAD:
        found["w"][1, 2, 3] = np.inf
    return found


def same(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


@functools.cache
def replay() -> list[tuple[Any, Any, Any]]:
    """State before, updates and state after, for every step of ``ORDER``, of four workers on one device."""
    tx = gc.switched(made())
    state, update = vmapped(tx, PARAMS, N)
    result = []
    for step, number in enumerate(ORDER):
        before = gc.set_choice(state, list(CANDIDATES)[number])
        updates, state = update(gradients(step), before, PARAMS)
        result.append(jax.tree.map(np.asarray, (before, updates, state)))
    assert update._cache_size() == 1
    return result


def kept(state: Any) -> np.ndarray:
    """What all candidates hold of the matrix."""
    shape = PARAMS["w"].shape
    return sum(mean.reshape(-1)[: np.prod(shape)].reshape(shape) for s in state.inner for mean in means_kept(s, N))


def test_updates_and_what_all_candidates_keep_are_all_mean_gradients() -> None:
    due = {k: np.zeros(v.shape) for k, v in PARAMS.items()}
    moved = {k: np.zeros(v.shape) for k, v in PARAMS.items()}
    held = []
    for step, (_, updates, state) in enumerate(replay()):
        for name, update in updates.items():
            assert (update == update[:1]).all()
            moved[name] += np.asarray(update[0], np.float64)
            due[name] += 0 if step == BAD else gradients(step)[name].astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(moved["w"] + kept(state), due["w"], atol=2e-5)
        np.testing.assert_allclose(moved["b"], due["b"], atol=1e-5)
        held.append(np.abs(kept(state)).max())
    assert min(held) > 1e-2


def test_a_step_leaves_the_other_candidates_as_they_are() -> None:
    for number, (before, _, after) in zip(ORDER, replay(), strict=True):
        assert int(after.choice) == number
        for other in set(range(3)) - {number}:
            same(before.inner[other], after.inner[other])
        assert int(after.inner[number].step) == int(before.inner[number].step) + 1
    assert [int(inner.skipped) for inner in after.inner] == [0, 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", CANDIDATES)
def test_each_candidate_is_bit_by_bit_what_it_is_by_itself(name: str) -> None:
    tx, number = CANDIDATES[name](), list(CANDIDATES).index(name)
    state, update = vmapped(tx, PARAMS, N)
    for step, (_, updates, after) in enumerate(replay()):
        if ORDER[step] == number:
            alone, state = update(gradients(step), state, PARAMS)
            same(updates, alone)
        same(after.inner[number], state)


def chain(candidates: dict[str, Any]) -> optax.GradientTransformationExtraArgs:
    return optax.chain(gc.switched(candidates), optax.sgd(0.1))


@pytest.mark.slow
def test_the_train_step_is_one_program_whose_branches_send_what_each_candidate_does() -> None:
    candidates = {
        "dense": optax.chain(gc.dense(axis_name=AXIS), optax.trace(0.9)),
        "int8": gc.block_quantized(axis_name=AXIS),
        "dgc": gc.dgc(axis_name=AXIS),
    }
    params = {"w": np.zeros((256, 128), np.float32), "b": np.zeros(128, np.float32)}
    mesh, rng = problem.mesh_of(N), np.random.default_rng(0)

    def loss(p, batch):
        return jnp.mean((batch @ p["w"] + p["b"] - 1.0) ** 2)

    batch = problem.on(mesh, rng.normal(size=(8, 256)).astype(np.float32))
    step = gc.make_train_step(loss, chain(candidates), mesh)
    state = gc.init_state(params, chain(candidates), mesh)
    compiled = step.lower(state, batch).compile()
    reports = [gc.wire_bytes(compiled, branch=i, mesh=mesh) for i in range(3)]
    # The loss is averaged too, in every branch.
    loss_bytes = 2 * (N - 1) / N * 4
    for report, (name, tx) in zip(reports, candidates.items(), strict=True):
        assert report.sent == pytest.approx(traffic_of(tx, params, {AXIS: N}).sent + loss_bytes, abs=4), name
        alone = gc.wire_bytes(gc.lower_update(params, tx, mesh).compile())
        assert report.sent - alone.sent == loss_bytes, name
    assert reports[0].sent > 3 * reports[1].sent > 30 * reports[2].sent
    for name in ("dgc", "dense", "int8", "dgc"):
        state, metrics = step(gc.set_choice(state, name), batch)
    assert step._cache_size() == 1
    assert float(metrics["skipped"]) == 0 and float(gc.diagnostics(state)["switched/choice"]) == 2


def trained(state: Any, step: Any, mesh: Any, choices: list[str], start: int = 0) -> Any:
    for number, name in enumerate(choices, start):
        state, _ = step(gc.set_choice(state, name), problem.on(mesh, problem.batch(number)))
    return state


@pytest.mark.slow
def test_a_checkpoint_has_the_choice_and_all_memories_and_goes_on_as_if_nothing_had_been(tmp_path) -> None:
    mesh, tx = problem.mesh_of(N), chain(made())
    step = gc.make_train_step(problem.loss, tx, mesh, donate=False)
    state = trained(gc.init_state(problem.params(), tx, mesh), step, mesh, ["topk", "int4", "topk"])
    gc.save_checkpoint(tmp_path / "saved", state)
    again = gc.restore_checkpoint(tmp_path / "saved", gc.init_state(problem.params(), tx, mesh))
    assert int(again.opt_state[0].choice) == 2
    same(again, state)
    same(*(trained(s, step, mesh, ["int4", "topk"], 3) for s in (state, again)))
    for others in (made("topk", "int4", "dense"), {name.upper(): tx for name, tx in made().items()}):
        with pytest.raises(ValueError, match=r"saved with SwitchedState\(names=\('dense', 'int4', 'topk'\)\), .* into"):
            gc.restore_checkpoint(tmp_path / "saved", gc.init_state(problem.params(), chain(others), mesh))
    # Onto another number of workers.
    mesh = problem.mesh_of(2)
    fewer = gc.restore_checkpoint(tmp_path / "saved", gc.init_state(problem.params(), tx, mesh))
    assert int(fewer.opt_state[0].choice) == 2
    for before, after in zip(state.opt_state[0].inner, fewer.opt_state[0].inner, strict=True):
        for one, other in itertools.zip_longest(means_kept(before, N), means_kept(after, 2)):
            np.testing.assert_allclose(one, other, atol=1e-6)
    trained(fewer, gc.make_train_step(problem.loss, tx, mesh), mesh, ["topk", "dense"], 3)


@pytest.mark.slow
@pytest.mark.parametrize("around", ("weighted", "hierarchical", "diloco"))
def test_inside_what_goes_around_an_exchange(around: str) -> None:
    """As the candidate by itself there, and the other's memory stays, whatever is done to it on the way."""
    wrap = {
        "weighted": lambda tx: gc.weighted(tx, axis_name=AXIS),
        "hierarchical": lambda tx: gc.hierarchical(tx, axis_name=AXIS, inner_axis_name="inner"),
        "diloco": lambda tx: gc.diloco(tx, axis_name=AXIS, every=2),
    }[around]
    mesh = problem.mesh_of(N)
    if around == "hierarchical":
        mesh = jax.make_mesh((N, 2), (AXIS, "inner"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    axes = (AXIS, "inner") if around == "hierarchical" else AXIS
    options = {"weight": lambda batch: jnp.abs(batch["x"][0, 0])} if around == "weighted" else {}
    results = []
    for tx in (gc.switched(made("int4", "topk")), made("topk")["topk"]):
        whole = optax.chain(wrap(tx), optax.sgd(0.1))
        if around == "diloco":
            whole = optax.chain(optax.sgd(0.1), wrap(tx))
        state = gc.init_state(problem.params(), whole, mesh, axis_name=axes, replicas=around == "diloco")
        state = state if results else gc.set_choice(state, "topk")
        step = gc.make_train_step(problem.loss, whole, mesh, axis_name=axes, **options)
        for number in range(4):
            batch = jax.device_put(problem.batch(number), gc.data_sharding(mesh, axis_name=axes))
            state, _ = step(state, batch)
        results.append(state)
    same(results[0].params, results[1].params)


REFUSED = {
    "nothing": ({}, "candidates must not be empty"),
    "no exchange": ({"dense": gc.dense(axis_name=None), "sgd": optax.sgd(0.1)}, "no exchange in the candidate 'sgd'"),
    "switched": ({"a": gc.switched({"b": gc.dense(axis_name=None)})}, "the candidate 'a' is switched itself"),
    "replicas": (
        {"a": gc.diloco(gc.dense(axis_name=None), axis_name=None, every=2)},
        "replicas of the candidate 'a' differ, .* put switched inside",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_switched_is_refused(what: str) -> None:
    candidates, sentence = REFUSED[what]
    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(lambda p: gc.switched(candidates).init(p), PARAMS)


def test_candidates_that_return_other_shapes_are_refused() -> None:
    shorter = optax.stateless(lambda updates, params: jax.tree.map(lambda u: u[:1], updates))
    tx = gc.switched({"a": gc.dense(axis_name=None), "b": optax.chain(gc.dense(axis_name=None), shorter)})
    with pytest.raises(ValueError, match="the candidates a, b differ in the shapes or types"):
        jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), PARAMS)


def test_a_name_that_is_none_and_a_state_without_any_are_refused() -> None:
    state = jax.eval_shape(gc.switched({"dense": gc.dense(axis_name=None), "dgc": gc.dgc(axis_name=None)}).init, PARAMS)
    with pytest.raises(ValueError, match="did you mean 'dense'"):
        gc.set_choice(state, "dens")
    with pytest.raises(ValueError, match="nothing is switched in this state"):
        gc.set_choice(optax.sgd(0.1).init(PARAMS), "dense")
