"""Gradients that a client has reduced before the exchange are refused where nothing is tracked, and no others are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType

import gradcomp_jax as gc
from gradcomp_jax import _origins

AXIS, N = "data", 4
PARAMS = {"w": np.full((32, 48), 0.1, np.float32), "b": np.zeros((48,), np.float32)}
BATCH = np.random.default_rng(0).normal(size=(N, 2, 32)).astype(np.float32)
REFUSED = r"(?s)already reduced over 'data'.*a pmean, psum or all_gather before the exchange"


def loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


def gradient_update_fn(loss: Callable[..., Any], optimizer: Any, pmap_axis_name: str | None) -> Callable[..., Any]:
    """As brax has it: the mean first, if there is a name, then the optimizer."""

    def update(params: Any, x: jax.Array, optimizer_state: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        if pmap_axis_name is not None:
            grads = lax.pmean(grads, axis_name=pmap_axis_name)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
        return value, optax.apply_updates(params, updates), optimizer_state

    return update


def _shard_map(worker: Callable[..., Any]) -> Callable[..., Any]:
    mesh = jax.make_mesh((N,), (AXIS,), axis_types=(AxisType.Auto,))

    def inner(params: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda a: a[None], worker(params, x[0]))

    specs = {"in_specs": (jax.P(), jax.P(AXIS)), "out_specs": jax.P(AXIS)}
    return jax.jit(jax.shard_map(inner, mesh=mesh, check_vma=False, **specs))


AXES = {
    "pmap": lambda worker: jax.pmap(worker, axis_name=AXIS, in_axes=(None, 0)),
    "shard_map": _shard_map,
    "vmap in jit": lambda worker: jax.jit(jax.vmap(worker, axis_name=AXIS, in_axes=(None, 0))),
    "jit in vmap": lambda worker: jax.vmap(jax.jit(worker), axis_name=AXIS, in_axes=(None, 0)),
}


def traced(worker: Callable[..., Any], axes: str = "pmap") -> None:
    jax.eval_shape(AXES[axes](worker), PARAMS, BATCH)


def exchanging(gradients: Callable[[Any, jax.Array], Any]) -> Callable[..., Any]:
    """A worker whose gradients come from ``gradients(params, x)``."""
    tx = gc.dense(axis_name=AXIS)

    def worker(params: Any, x: jax.Array) -> Any:
        return tx.update(gradients(params, x), tx.init(params), params)[0]

    return worker


def own(params: Any, x: jax.Array) -> Any:
    return jax.grad(loss)(params, x)


def mapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, x: jax.tree.map(function, own(params, x))


METHODS = {
    "terngrad": lambda: gc.terngrad(axis_name=AXIS),
    "dgc that warms up": lambda: gc.dgc(axis_name=AXIS, warm_up=gc.warm_up(8)),
    "1-bit Adam": lambda: gc.one_bit_adam(axis_name=AXIS, warm_up_steps=8),
    "switched": lambda: gc.switched({"dense": gc.dense(axis_name=AXIS), "qsgd": gc.qsgd(axis_name=AXIS)}),
}


@pytest.mark.parametrize(("method", "axes"), [*zip(METHODS, AXES, strict=True), *(("terngrad", axes) for axes in AXES)])
def test_a_client_that_means_first_is_told_so(method: str, axes: str) -> None:
    tx = optax.chain(METHODS[method](), optax.sgd(0.1))
    update = gradient_update_fn(loss, tx, AXIS)
    with pytest.raises(ValueError, match=REFUSED):
        traced(lambda params, x: update(params, x, tx.init(params))[1], axes)


@pytest.mark.parametrize("axes", AXES)
def test_a_client_that_is_given_no_name_is_taken(axes: str) -> None:
    tx = optax.chain(gc.dense(axis_name=AXIS), optax.sgd(0.1))
    update = gradient_update_fn(loss, tx, None)
    traced(lambda params, x: update(params, x, tx.init(params))[1], axes)


def _clipped(params: Any, x: jax.Array) -> Any:
    grads = lax.pmean(own(params, x), AXIS)
    return optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0]


def _in_one_buffer(params: Any, x: jax.Array) -> Any:
    flat, shape = jax.flatten_util.ravel_pytree(own(params, x))
    return shape(lax.pmean(flat, AXIS))


def _where_finite(g: jax.Array) -> jax.Array:
    mean = lax.pmean(g, AXIS)
    return jnp.where(jnp.isfinite(mean).all(), mean, 0.0)


REDUCED = {
    "a sum over the number of workers": mapped(lambda g: lax.psum(g, AXIS) / N),
    "a sum in bfloat16": mapped(lambda g: lax.psum(g.astype(jnp.bfloat16), AXIS).astype(jnp.float32)),
    "a mean in a function of its own": lambda p, x: jax.jit(lambda g: lax.pmean(g, AXIS))(own(p, x)),
    "a mean and clipping by its norm": _clipped,
    "a mean over all leaves in one buffer": _in_one_buffer,
    "the mean of what was gathered": mapped(lambda g: lax.all_gather(g, AXIS).mean(axis=0)),
    "a reduce-scatter and a gathering": mapped(
        lambda g: lax.all_gather(lax.psum_scatter(g, AXIS, tiled=True), AXIS, tiled=True)
    ),
    "a mean where it is finite": mapped(_where_finite),
    "a mean without a loss scale of the state": lambda p, x: jax.tree.map(
        lambda g: lax.pmean(g, AXIS) / p["b"][0], own(p, x)
    ),
    "the mean of one matrix": lambda p, x: {**own(p, x), "w": lax.pmean(own(p, x)["w"], AXIS)},
}


@pytest.mark.parametrize("how", REDUCED)
def test_a_gradient_that_any_collective_has_reduced_is_refused(how: str) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        traced(exchanging(REDUCED[how]))


def _by_norm(params: Any, x: jax.Array) -> Any:
    grads = own(params, x)
    norm = jnp.sqrt(lax.psum(optax.tree.norm(grads) ** 2, AXIS))
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm), grads)


def _centred(params: Any, x: jax.Array) -> Any:
    """A vector that is behind a mean over the workers: its gradient is the mean of theirs by the chain rule."""

    def of(p: Any) -> jax.Array:
        hidden = jnp.tanh(x @ p["w"])
        return jnp.mean((hidden - lax.pmean(hidden.mean(0) + p["b"], AXIS)) ** 2)

    return jax.grad(of)(params)


OWN = {
    "clipped by a norm over all workers": _by_norm,
    "over a count of all workers": lambda p, x: jax.tree.map(
        lambda g: g / lax.psum(jnp.float32(x.shape[0]), AXIS), own(p, x)
    ),
    "of frozen parameters": lambda p, x: jax.tree.map(jnp.zeros_like, p),
    "of frozen parameters over a count": lambda p, x: jax.tree.map(
        lambda q: jnp.zeros_like(q) / lax.psum(x[0, 0], AXIS), p
    ),
    "of one frozen matrix": lambda p, x: {**own(p, x), "w": jnp.zeros_like(p["w"])},
    "ones": lambda p, x: jax.tree.map(jnp.ones_like, p),
    "of a mean of losses": lambda p, x: jax.grad(lambda q: lax.pmean(loss(q, x), AXIS))(p),
    "with a mean of vectors in the loss": _centred,
    "with something of the worker's own added": mapped(lambda g: lax.pmean(g, AXIS) + 0.1 * g),
    "masked by what all workers agree on": mapped(lambda g: jnp.where(lax.psum(jnp.abs(g), AXIS) > 1, g, 0.0)),
    "of the parameters alone": lambda p, x: p,
    "sent to the next worker": mapped(lambda g: lax.ppermute(g, AXIS, [(i, (i + 1) % N) for i in range(N)])),
    "averaged within groups": mapped(lambda g: lax.psum(g, AXIS, axis_index_groups=[[0, 1], [2, 3]])),
    "of another worker, out of all": mapped(lambda g: lax.all_gather(g, AXIS)[(lax.axis_index(AXIS) + 1) % N]),
    "of a matrix that the loss means": lambda p, x: jax.grad(
        lambda q: loss(p, x) + jnp.mean(lax.pmean(x @ p["w"] + q["w"][:2], AXIS) ** 2)
    )(p),
    "of a loss that is linear in a mean": lambda p, x: jax.grad(
        lambda q: jnp.vdot(q["b"], p["b"]) + jnp.sum(q["w"] * lax.pmean(jnp.outer(x[0], p["b"]), AXIS))
    )(p),
    "of a loss in a program of its own": lambda p, x: jax.jit(
        jax.grad(lambda q: jnp.sum(q["w"] * lax.pmean(jnp.outer(x[0], p["b"]), AXIS)))
    )(p),
}


@pytest.mark.parametrize("which", OWN)
def test_a_workers_own_gradient_is_taken_whatever_else_was_reduced(which: str) -> None:
    traced(exchanging(OWN[which]))


INSIDE = {
    "a program": lambda inner, x: jax.jit(inner)(),
    "a branch": lambda inner, x: lax.cond(x[0, 0] > 0, inner, inner),
    "a loop": lambda inner, x: lax.scan(lambda c, _: (c, inner()), None, None, length=1)[1],
}


@pytest.mark.parametrize(
    ("inside", "axes"),
    [("a program", "pmap"), ("a branch", "shard_map"), ("a loop", "vmap in jit"), ("a loop", "jit in vmap")],
)
def test_what_is_closed_over_is_followed_to_where_it_was_made(inside: str, axes: str) -> None:
    tx = gc.dense(axis_name=AXIS)

    def worker(of: Callable[[jax.Array], jax.Array], before: Callable[[jax.Array], jax.Array] = lambda g: g) -> Any:
        def step(params: Any, x: jax.Array) -> Any:
            grads = jax.tree.map(before, own(params, x))
            return INSIDE[inside](lambda: tx.update(jax.tree.map(of, grads), tx.init(params), params)[0], x)

        return step

    traced(worker(lambda g: g + lax.pmean(g, AXIS)), axes)
    # vmap shows nothing of a value that a program in it closes over.
    if axes != "vmap in jit":
        with pytest.raises(ValueError, match=REFUSED):
            traced(worker(lambda g: 0.5 * g, lambda g: lax.pmean(g, AXIS)), axes)


def test_the_work_is_bounded_however_long_a_program_is(monkeypatch: pytest.MonkeyPatch) -> None:
    read, equation_of = [], _origins._equation_of
    monkeypatch.setattr("gradcomp_jax._origins._equation_of", lambda x: read.append(x) or equation_of(x))

    def long(g: jax.Array) -> jax.Array:
        for _ in range(500):
            g = jnp.sin(g) * g
        return g

    traced(exchanging(mapped(lambda g: long(lax.pmean(g, AXIS)))))
    assert 0 < len(read) < 500


def test_a_mean_over_another_axis_is_a_workers_own_gradient_and_one_worker_may_mean() -> None:
    def traced_over(shape: tuple[int, int], over: Any) -> None:
        mesh = jax.make_mesh(shape, (AXIS, "model"), axis_types=(AxisType.Auto,) * 2)
        worker = exchanging(mapped(lambda g: lax.pmean(g, over)))

        def one(params: Any, x: jax.Array) -> Any:
            return jax.tree.map(lambda a: a[None], worker(params, x[0]))

        specs = {"in_specs": (jax.P(), jax.P((AXIS, "model"))), "out_specs": jax.P((AXIS, "model"))}
        jax.eval_shape(jax.shard_map(one, mesh=mesh, check_vma=False, **specs), PARAMS, BATCH)

    traced_over((2, 2), "model")
    traced_over((1, 4), (AXIS, "model"))
    with pytest.raises(ValueError, match=REFUSED):
        traced_over((2, 2), ("model", AXIS))


def test_a_mean_in_a_vmap_over_another_axis_inside_the_workers_is_a_workers_own_gradient() -> None:
    def per_task(params: Any, x: jax.Array) -> Any:
        of_tasks = jax.vmap(lambda row: lax.pmean(own(params, row[None]), "tasks"), axis_name="tasks")
        return jax.tree.map(lambda g: g[0], of_tasks(x))

    for axes in AXES:
        traced(exchanging(per_task), axes)
