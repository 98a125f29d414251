"""What overlaps: nothing of this step in the exchange of an earlier one, and a thread with the same results."""

import threading

import jax
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from tests.dependencies import waits_for
from tests.marks import slow_but
from tests.replicas.problem import AXIS, N, batch, loss, mesh_of, params


def methods():
    return {"dense": gc.dense(axis_name=AXIS), "dgc": gc.dgc(axis_name=AXIS, density=0.25, block=8, mask=True)}


def needed(tx: optax.GradientTransformation) -> list[bool]:
    """For each collective of the train step whether it needs this step's batch."""
    mesh = mesh_of()
    state = gc.init_state(params(), tx, mesh, replicas=True)
    compiled = gc.make_train_step(loss, tx, mesh, mean_metrics=False).lower(state, batch(0)).compile()
    count = len(jax.tree.leaves(state))
    return waits_for(compiled.as_text(), {count, count + 1})


@pytest.mark.parametrize(("delay", "name"), [(0, "dense"), (1, "dgc"), (3, "dgc")])
def test_the_exchange_needs_nothing_of_this_steps_batch(name: str, delay: int) -> None:
    """In the compiled step no collective waits for the forward or backward pass; without a delay all of them do."""
    found = needed(optax.chain(gc.delayed_average(methods()[name], axis_name=AXIS, delay=delay), optax.sgd(0.02)))
    assert not any(found) if delay else all(found)


@pytest.mark.slow
@pytest.mark.parametrize("delay", (0, 2))
def test_an_outer_step_that_arrives_late_needs_nothing_of_this_steps_batch(delay: int) -> None:
    outer = gc.diloco(methods()["dgc"], axis_name=AXIS, every=4, parts=2, delay=delay)
    found = needed(optax.chain(optax.sgd(0.02), outer))
    assert not any(found) if delay else all(found)


@pytest.mark.parametrize(
    ("delay", "every", "compensate", "name"),
    slow_but([(2, 3, True, "dense")], [(2, 3, True, "dense"), (1, 1, True, "dgc"), (3, 2, False, "dgc")]),
)
def test_a_thread_computes_what_one_program_does(name: str, delay: int, every: int, compensate: bool) -> None:
    """Up to the rounding of sums that one compiler run joins and another does not: parameters of size 2 after 16 steps."""
    mesh = mesh_of()
    options = {"delay": delay, "every": every, "compensate": compensate}
    overlapped = gc.make_overlapped_step(
        loss, methods()[name], optax.sgd(0.02, momentum=0.5), mesh, axis_name=AXIS, **options
    )
    one = gc.make_train_step(loss, overlapped.tx, mesh, mean_metrics=False)
    a, b = (gc.init_state(params(), overlapped.tx, mesh, replicas=True) for _ in range(2))
    for n in range(10):
        a, seen = overlapped(a, batch(n))
        b, want = one(b, batch(n))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), (a, seen), (b, want))
    # From the middle on with the other of the two: nothing is missing in the state.
    overlapped.wait()
    c = jax.tree.map(jax.numpy.copy, a)
    for n in range(10, 16):
        a, _ = one(a, batch(n))
        c, _ = overlapped(c, batch(n))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), a, c)
    overlapped.wait()


@pytest.mark.slow
def test_a_step_computes_its_gradient_while_what_lands_in_it_is_on_its_way() -> None:
    """With a delay of one step an exchange has as long as the next gradient takes: here it ends only after that."""
    mesh = mesh_of()
    step = gc.make_overlapped_step(loss, methods()["dense"], optax.sgd(0.02), mesh, axis_name=AXIS, delay=1)
    gradient, cross, computed = step._gradient, step._cross, threading.Semaphore(0)

    def counted(*given):
        found = jax.block_until_ready(gradient(*given))
        computed.release()
        return found

    def after_the_gradient(*given):
        assert computed.acquire(timeout=60), "the step waits for the exchange before it computes"
        return cross(*given)

    step._gradient, step._cross = counted, after_the_gradient
    state = gc.init_state(params(), step.tx, mesh, replicas=True)
    for n in range(4):
        state, _ = step(state, batch(n))
    # The last one lands in a step that is not taken.
    computed.release()
    step.wait()


def test_a_failed_exchange_is_raised_where_it_lands_and_a_new_attempt_begins_anew() -> None:
    cut = [True]

    def through(value):
        if cut[0]:
            raise RuntimeError("the link is gone")
        return value

    mesh = mesh_of()
    method = gc.dense(axis_name=AXIS)

    def update(updates, state, params=None):
        means, state = method.update(updates, state)
        mark = jax.pure_callback(through, jax.ShapeDtypeStruct((), np.float32), np.float32(0))
        return jax.tree.map(lambda m: m + mark, means), state

    failing = optax.GradientTransformation(method.init, update)
    step = gc.make_overlapped_step(loss, failing, optax.sgd(0.02), mesh, axis_name=AXIS, delay=2)
    state = gc.init_state(params(), step.tx, mesh, replicas=True)
    with pytest.raises(Exception, match="the link is gone"):
        for n in range(4):
            state, _ = step(state, batch(n))
    # What was in flight when it failed is not held against whoever goes back to a checkpoint.
    cut[0] = False
    state = gc.init_state(params(), step.tx, mesh, replicas=True)
    for n in range(4):
        state, _ = step(state, batch(n))
    step.wait()
    assert int(state.step) == 4


def test_what_cannot_overlap_is_refused() -> None:
    mesh = mesh_of()
    with pytest.raises(ValueError, match="use make_train_step"):
        gc.make_overlapped_step(loss, methods()["dense"], optax.sgd(0.1), mesh, axis_name=AXIS, delay=0)
    step = gc.make_overlapped_step(loss, methods()["dense"], optax.sgd(0.1), mesh, axis_name=AXIS, delay=1)
    with pytest.raises(ValueError, match="replicas=True"):
        step(gc.init_state(params(), step.tx, mesh), batch(0))
    other = gc.make_overlapped_step(loss, methods()["dense"], optax.sgd(0.1), mesh, axis_name=AXIS, delay=2)
    for tx in (other.tx, optax.sgd(0.1)):
        with pytest.raises(ValueError, match=r"delay is 1.*init_state\(params, step.tx, mesh, replicas=True\)"):
            step(gc.init_state(params(), tx, mesh, replicas=True), batch(0))
    with pytest.raises(ValueError, match="do not divide the batch"):
        step(gc.init_state(params(), step.tx, mesh, replicas=True), jax.tree.map(lambda x: x[:3], batch(0)))
    assert N == 4


def test_a_thread_tells_of_skipped_steps() -> None:
    """As one program does, though the exchange's state is not in the one that computes the metrics."""
    mesh, method = mesh_of(), gc.eden(axis_name=AXIS, mask=True)
    overlapped = gc.make_overlapped_step(loss, method, optax.sgd(0.02), mesh, axis_name=AXIS, delay=1)
    one = gc.make_train_step(loss, overlapped.tx, mesh, mean_metrics=False)
    a, b = (gc.init_state(params(), overlapped.tx, mesh, replicas=True) for _ in range(2))
    counts = []
    for n in range(4):
        data = batch(n)
        if n == 1:
            # Finite, and more than a scale of the code holds.
            data["y"][:, 0, 0] = -3e36
        (a, seen), (b, want) = overlapped(a, data), one(b, data)
        counts.append(np.asarray(seen["skipped"]).tolist())
        assert counts[-1] == np.asarray(want["skipped"]).tolist()
    overlapped.wait()
    assert counts[0] == [0] * N and min(counts[-1]) >= 1
