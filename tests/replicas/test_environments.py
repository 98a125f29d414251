"""What every method whose replicas differ promises, mapped over workers in every supported form."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import gradcomp_jax as gc
from gradcomp_jax import per_device
from gradcomp_jax.replicas import MARKED
from tests.conformance.environments import AXIS, ENVIRONMENTS, WORKERS, mesh_of
from tests.marks import slow_but

SHAPES = {
    "bias": ((13,), jnp.float32),
    "empty": ((0,), jnp.float32),
    "half": ((6, 5), jnp.bfloat16),
    "matrix": ((9, 21), jnp.float32),
    "one": ((1,), jnp.float32),
    "scalar": ((), jnp.float32),
}


def dense():
    return gc.dense(axis_name=AXIS)


def int8():
    return gc.block_quantized(axis_name=AXIS, block=32)


METHODS: dict[str, Callable[[], Any]] = {
    "delayed": lambda: gc.delayed_average(dense(), axis_name=AXIS, delay=2),
    "delayed-int8": lambda: gc.delayed_average(int8(), axis_name=AXIS, delay=1, every=2),
    "stale": lambda: gc.delayed_average(int8(), axis_name=AXIS, delay=2, compensate=False),
    "elastic": lambda: optax.chain(optax.sgd(0.1), gc.elastic_average(int8(), axis_name=AXIS, every=2)),
    "local": lambda: optax.chain(optax.sgd(0.1), gc.local_sgd(dense(), axis_name=AXIS, every=2)),
    "diloco": lambda: optax.chain(optax.sgd(0.1, 0.9), gc.diloco(int8(), axis_name=AXIS, every=3, parts=2)),
    "streaming": lambda: optax.chain(
        optax.sgd(0.1), gc.diloco(int8(), axis_name=AXIS, every=3, parts=2, delay=1, mix=0.5)
    ),
    "sparse_loco": lambda: optax.chain(optax.sgd(0.1), gc.sparse_loco(axis_name=AXIS, every=2, chunk=64)),
    "gossip": lambda: optax.chain(optax.sgd(0.1), gc.gossip(axis_name=AXIS)),
    "gossip-int8": lambda: optax.chain(
        optax.sgd(0.1),
        gc.gossip(axis_name=AXIS, graph="exponential", every=2, compressor=gc.compressors.block_quantized(block=32)),
    ),
    "accumulate": lambda: gc.accumulate(optax.chain(int8(), optax.sgd(0.1)), axis_name=AXIS, every=2),
}
each_method = pytest.mark.parametrize("method", METHODS)


def parameters(method: str) -> Any:
    """Of a delayed average float32 masters, whatever the gradients' dtype."""
    rng, wide = np.random.default_rng(1), method.startswith("delayed")
    return {k: np.asarray(rng.normal(size=s), jnp.float32 if wide else dtype) for k, (s, dtype) in SHAPES.items()}


def gradients(seed: int, kind: str = "normal") -> Any:
    """Stacked by worker."""
    rng = np.random.default_rng(seed)

    def draw(shape, dtype):
        value = np.zeros((WORKERS, *shape)) if kind == "zero" else rng.normal(size=(WORKERS, *shape))
        return np.asarray(value, dtype)

    return {k: draw(shape, dtype) for k, (shape, dtype) in SHAPES.items()}


def local_step(tx: Any) -> Callable[..., Any]:
    """One worker's update of its own parameters."""

    def step(gradient: Any, params: Any, state: Any) -> tuple[Any, Any]:
        params, state = per_device.lower((params, state))
        updates, state = tx.update(gradient, state, params)
        return per_device.lift(optax.apply_updates(params, updates)), per_device.lift(state, marked=MARKED)

    return step


def begin(tx: Any) -> Callable[[Any], Any]:
    def start(params: Any) -> Any:
        return per_device.lift(params), per_device.lift(tx.init(params), marked=MARKED)

    return start


@functools.cache
def trajectory(method: str, env: str) -> list[dict[str, np.ndarray]]:
    """Every worker's parameters after each of some steps, ``[workers, ...]``."""
    tx = METHODS[method]()
    step, result = local_step(tx), []
    if env.startswith("shard_map"):
        kind = AxisType.Explicit if "explicit" in env else AxisType.Auto
        mesh, spec = mesh_of(kind), PartitionSpec(AXIS)
        state = gc.init_state(parameters(method), tx, mesh, axis_name=AXIS, replicas=True)
        params, state = state.params, state.opt_state

        @jax.jit
        def update(gradient: Any, params: Any, state: Any) -> Any:
            specs = gc.state_specs((params, state), axis_name=AXIS)
            return jax.shard_map(
                lambda g, p, s: step(jax.tree.map(lambda a: a[0], g), p, s),
                mesh=mesh,
                in_specs=(spec, *specs),
                out_specs=specs,
                check_vma=env.endswith("vma"),
            )(gradient, params, state)

        def place(gradient: Any) -> Any:
            return jax.device_put(gradient, jax.NamedSharding(mesh, spec))
    else:
        start = begin(tx)
        axes = gc.state_axes(jax.eval_shape(start, parameters(method)))
        mapping = {"axis_name": AXIS, "out_axes": axes}
        if env == "pmap":
            first = jax.pmap(lambda p, _: start(p), in_axes=(None, 0), **mapping)
            params, state = first(parameters(method), np.zeros(WORKERS))
            update = jax.pmap(step, in_axes=(0, *axes), **mapping)
        else:
            begun = jax.jit(jax.vmap(start, in_axes=None, axis_size=WORKERS, **mapping))
            params, state = begun(parameters(method))
            update = jax.jit(jax.vmap(step, in_axes=(0, *axes), **mapping))
        place = lambda gradient: gradient  # noqa: E731
    structure = jax.tree.map(lambda a: (a.shape, a.dtype), (params, state))
    for n in range(7):
        params, state = update(place(gradients(n, "zero" if n == 3 else "normal")), params, state)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), (params, state)) == structure
        values = {k: np.asarray(mark.value).astype(np.float32) for k, mark in params.items()}
        result.append({k: v.reshape(WORKERS, *SHAPES[k][0]) for k, v in values.items()})
    return result


@pytest.mark.parametrize(
    ("method", "env"),
    slow_but(
        [("diloco", "shard_map-explicit")],
        [("diloco", "shard_map-explicit"), *((m, ENVIRONMENTS[1 + i % 5]) for i, m in enumerate(METHODS))],
    ),
)
def test_environments_agree(method: str, env: str) -> None:
    """The same replicas everywhere, up to the order in which numbers are added."""
    for got, want in zip(trajectory(method, env), trajectory(method, ENVIRONMENTS[0]), strict=True):
        for k in want:
            half = 2**-6 if k == "half" else 0
            np.testing.assert_allclose(got[k], want[k], rtol=2e-5 + half, atol=2e-5 + half, err_msg=k)
            assert np.isfinite(got[k]).all()


@pytest.mark.parametrize("method", ("local", "gossip", "gossip-int8"))
def test_the_replicas_mean_is_that_of_synchronous_training(method: str) -> None:
    """Of gradients that do not depend on the parameters every one counts once, wherever it was taken."""
    total = {k: np.zeros(shape) for k, (shape, _) in SHAPES.items()}
    first = {k: np.asarray(v.astype(np.float32)) for k, v in parameters(method).items()}
    for n, values in enumerate(trajectory(method, "vmap")):
        step = gradients(n, "zero" if n == 3 else "normal")
        for k in total:
            total[k] += np.asarray(step[k].astype(np.float32)).mean(axis=0)
            if k != "half":
                np.testing.assert_allclose(values[k].mean(axis=0), first[k] - 0.1 * total[k], rtol=1e-5, atol=1e-5)
