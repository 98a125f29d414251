"""What a step reports and averages does not depend on how the batch is divided into workers and micro-batches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc
from tests.training.problem import mesh_of

ROWS = 16
REAL = np.array([1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0], bool)
"""Four rows each: 4, 1, 3 and 0; two each: 2, 2, 1, 0, 2, 1, 0, 0."""


def batch() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(ROWS, 3)).astype(np.float32),
        "y": rng.normal(size=ROWS).astype(np.float32) * 3,
        "real": REAL,
    }


def params() -> dict[str, Any]:
    return {"w": np.array([0.5, -1, 2], np.float32)}


def loss(p: Any, b: Any) -> Any:
    """NaN, as is its gradient, where no row is real."""
    error = jnp.square(b["x"] @ p["w"] - b["y"])
    return jnp.where(b["real"], error, 0.0).sum() / b["real"].sum().astype(jnp.float32)


def tokens(b: Any) -> Any:
    return b["real"].sum()


def whole() -> tuple[Any, Any]:
    real = jax.tree.map(lambda a: a[REAL], batch())
    return jax.value_and_grad(loss)(params(), real)


def chain() -> Any:
    return optax.chain(gc.weighted(gc.dense(axis_name="data"), axis_name="data"), optax.sgd(0.1))


def seen(p: Any, b: Any, model_state: Any) -> Any:
    value = loss(p, b)
    correct = (jnp.square(b["x"] @ p["w"] - b["y"]) < 9) & b["real"]
    mean = jnp.where(b["real"][:, None], b["x"], 0).sum(0) / b["real"].sum().astype(jnp.float32)
    aux = {
        "twice": 2 * value,
        "hits": correct.sum(),
        "n": b["real"].sum(),
        "logits": (b["x"] @ p["w"])[:, None] * jnp.array([1.0, -1.0]),
        "sure": correct,
    }
    return value, (aux, {"mean": mean, "steps": model_state["steps"] + 1})


@pytest.mark.parametrize(("workers", "parts"), [(2, 2), pytest.param(2, 4, marks=pytest.mark.slow), (4, 2)])
def test_all_is_of_the_mean_over_everything_weighed_however_it_is_divided(workers: int, parts: int) -> None:
    mesh, tx = mesh_of(workers), chain()
    begun = {"mean": np.zeros(3, np.float32), "steps": np.int32(0)}
    state = gc.init_state(params(), tx, mesh, model_state=begun)
    step = gc.make_train_step(seen, tx, mesh, has_aux=True, accumulate=parts, weight=tokens, donate=False)
    new, metrics = step(state, batch())
    value, gradient = whole()
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    np.testing.assert_allclose(new.params["w"], params()["w"] - 0.1 * gradient["w"], rtol=1e-5)
    np.testing.assert_allclose(new.model_state["mean"], batch()["x"][REAL].mean(axis=0), rtol=1e-5)
    assert int(new.model_state["steps"]) == 1 and float(metrics["skipped"]) == 0
    aux, outputs = metrics["aux"], batch()["x"] @ params()["w"]
    correct = (np.square(outputs - batch()["y"]) < 9) & REAL
    np.testing.assert_allclose(aux["twice"], 2 * value, rtol=1e-5)
    assert int(aux["hits"]) == correct.sum() and int(aux["n"]) == REAL.sum()
    np.testing.assert_allclose(aux["logits"], outputs[:, None] * np.array([1, -1]), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(aux["sure"], correct)
    assert aux["sure"].dtype == jnp.bool_ and not aux["logits"].sharding.is_fully_replicated


def test_a_chain_that_accumulates_weighs_each_batch() -> None:
    """Of two workers, in four batches, one of them empty on each worker."""
    inner = optax.chain(gc.weighted(gc.dense(axis_name="data"), axis_name="data"), optax.sgd(0.1))
    tx = gc.accumulate(inner, axis_name="data", every=4)
    b = jax.tree.map(lambda a: a.reshape(2, 4, 2, *a.shape[1:]), batch())

    def worker(b: Any) -> Any:
        p, state = params(), tx.init(params())
        for number in range(4):
            part = jax.tree.map(lambda a, number=number: a[number], b)
            _, gradient = jax.value_and_grad(loss)(p, part)
            updates, state = tx.update(gradient, state, p, weight=tokens(part))
            p = optax.apply_updates(p, updates)
        return p, state.weight

    after, left = jax.jit(jax.vmap(worker, axis_name="data"))(b)
    np.testing.assert_allclose(after["w"], np.tile(params()["w"] - 0.1 * whole()[1]["w"], (2, 1)), rtol=1e-5)
    assert not left.value.any()


def counted(p: Any, x: Any) -> Any:
    hits = (x[:, 0] > 0).sum()
    return jnp.mean((x @ p["w"]) ** 2), {"hits": hits, "n": jnp.int32(x.shape[0]), "mean": x.mean(), "out": x @ p["w"]}


@pytest.mark.parametrize("accumulate", (1, 2))
def test_counts_are_added_up_and_examples_joined_outside_of_the_axis(accumulate: int) -> None:
    mesh, x = mesh_of(4), batch()["x"]
    value_and_grad = gc.local_value_and_grad(counted, axis_name="data", mesh=mesh, has_aux=True, accumulate=accumulate)
    compiled = jax.jit(value_and_grad)
    (_, aux), _ = compiled(params(), x)
    assert int(aux["hits"]) == (x[:, 0] > 0).sum() and int(aux["n"]) == ROWS
    np.testing.assert_allclose(aux["mean"], x.mean(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(aux["out"], x @ params()["w"], rtol=1e-5, atol=1e-5)
    assert "all-gather" not in gc.wire_bytes(compiled.lower(params(), x).compile()).by("kind")


@pytest.mark.parametrize(
    ("of", "aux", "sentence"),
    [
        (lambda x: x.sum() > 0, "auto", r"aux 'it', bool\[\].*say what it is by aux='mean'"),
        (lambda x: jnp.uint32(3), "auto", r"aux 'it', uint32\[\].*'max' for a count that all workers have alike"),
        (lambda x: x.T, "auto", r"aux 'it', float32\[3, 4\], grows with the batch, and not along its first dimension"),
        (lambda x: x.sum(), "examples", r"aux 'it', float32\[\], is one number"),
        (lambda x: x.sum(), "average", r"aux must be one of 'auto', 'mean', 'sum', 'max', 'examples', got 'average'"),
        (lambda x: x.sum(), {"other": "mean"}, r"aux= must be one of .* or a tree of them"),
    ],
    ids=("boolean", "unsigned", "transposed", "no examples", "mistyped", "another tree"),
)
def test_what_is_not_clear_is_refused(of: Any, aux: Any, sentence: str) -> None:
    mesh = mesh_of(4)
    value_and_grad = gc.local_value_and_grad(
        lambda p, x: (jnp.mean((x @ p["w"]) ** 2), {"it": of(x)}), axis_name="data", mesh=mesh, has_aux=True, aux=aux
    )
    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(value_and_grad, params(), batch()["x"])


@pytest.mark.slow
def test_what_the_user_says_an_aux_is_it_is() -> None:
    mesh, x = mesh_of(4), batch()["x"]

    def with_all(p: Any, x: Any) -> Any:
        some = (x[:, 0] > 0).sum()
        return jnp.mean((x @ p["w"]) ** 2), {"a": some, "b": x.sum(), "c": some, "d": (x > 2).any(), "e": x[:, :2]}

    kinds = {"a": "mean", "b": "sum", "c": "max", "d": "max", "e": "auto"}
    for accumulate in (1, 2):
        value_and_grad = gc.local_value_and_grad(
            with_all, axis_name="data", mesh=mesh, has_aux=True, aux=kinds, accumulate=accumulate
        )
        (_, aux), _ = jax.jit(value_and_grad)(params(), x)
        each = (x[:, 0] > 0).reshape(4 * accumulate, -1).sum(axis=1)
        np.testing.assert_allclose(aux["a"], each.mean(), rtol=1e-6)
        np.testing.assert_allclose(aux["b"], x.sum(), rtol=1e-5)
        assert int(aux["c"]) == each.max()
        assert bool(aux["d"]) == (x > 2).any() and aux["d"].dtype == jnp.bool_
        np.testing.assert_array_equal(aux["e"], x[:, :2])


@pytest.mark.slow
def test_inside_the_axis_micro_batches_are_put_together_by_the_same_rule() -> None:
    mesh, x = mesh_of(2), batch()["x"]
    value_and_grad = gc.local_value_and_grad(counted, axis_name="data", has_aux=True, accumulate=4)

    def worker(p: Any, x: Any) -> Any:
        (_, aux), _ = value_and_grad(p, x)
        return {name: a if a.ndim else a[None] for name, a in aux.items()}

    mapped = jax.shard_map(worker, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    aux = jax.jit(mapped)(params(), x)
    np.testing.assert_array_equal(aux["hits"], (x[:, 0] > 0).reshape(2, -1).sum(axis=1))
    np.testing.assert_array_equal(aux["n"], [8, 8])
    np.testing.assert_allclose(aux["out"], x @ params()["w"], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_overlapped_steps_keep_counts_and_join_examples() -> None:
    mesh, x = mesh_of(4), batch()["x"]
    step = gc.make_overlapped_step(
        counted, gc.dense(axis_name="data"), optax.sgd(0.1), mesh, delay=1, has_aux=True, every=2
    )
    state = gc.init_state(params(), step.tx, mesh, replicas=True)
    _, metrics = step(state, jax.device_put(x, gc.data_sharding(mesh)))
    step.wait()
    np.testing.assert_array_equal(metrics["aux"]["hits"], (x[:, 0] > 0).reshape(4, -1).sum(axis=1))
    np.testing.assert_allclose(metrics["aux"]["out"], x @ params()["w"], rtol=1e-5, atol=1e-5)
