"""No option of a method of replicas, or of what goes around an exchange, is ignored in silence."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import gradcomp_jax as gc

AXIS = "data"
N = 4
PARAMS = {"w": jax.ShapeDtypeStruct((48, 72), jnp.float32), "v": jax.ShapeDtypeStruct((3, 16, 24), jnp.float32)}


def dense() -> Any:
    return gc.dense(axis_name=AXIS)


def selection() -> Any:
    return gc.topk_sgd(axis_name=AXIS, density=0.1)


def drawing(**options: Any) -> Any:
    code = gc.compressors.block_quantized(block=64, stochastic=True)
    return gc.gossip(axis_name=AXIS, **{"compressor": code, **options})


def falling(step: Any) -> Any:
    return 0.5 / (1.0 + step.astype(jnp.float32))


def one_leaf(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim == 3, params)


DENSITIES = (0.05, 0.2)
CONTROLLED: dict[str, Any] = {
    "every": 3,
    "rows": 2,
    "memory": gc.memory.none(),
    "collective": "two_phase",
    "mask": one_leaf,
    "make": lambda density, block=None: gc.compressors.topk(density, block=block, dtype="int8"),
}

# A function of options, and for each of its options a value that is not its default.
CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "accumulate": (lambda every=2: gc.accumulate(dense(), axis_name=AXIS, every=every), {"every": 3}),
    "delayed_average": (
        lambda delay=2, **more: gc.delayed_average(dense(), axis_name=AXIS, delay=delay, **more),
        {"delay": 3, "every": 2, "compensate": False},
    ),
    "diloco": (
        lambda **more: gc.diloco(dense(), axis_name=AXIS, **more),
        {"every": 7, "learning_rate": 0.5, "momentum": 0.5, "parts": 2, "delay": 2},
    ),
    "diloco, late": (lambda mix=0.0: gc.diloco(dense(), axis_name=AXIS, delay=2, mix=mix), {"mix": 0.5}),
    "sparse_loco": (
        lambda **more: gc.sparse_loco(axis_name=AXIS, **more),
        {
            "every": 7,
            "density": 0.1,
            "chunk": 64,
            "decay": 0.5,
            "learning_rate": 0.5,
            "parts": 2,
            "delay": 2,
            "collective": "two_phase",
            "mask": one_leaf,
        },
    ),
    "local_sgd": (lambda every=2: gc.local_sgd(dense(), axis_name=AXIS, every=every), {"every": 3}),
    "outer_average": (
        lambda every=2, **more: gc.outer_average(dense(), optax.sgd(0.7), axis_name=AXIS, every=every, **more),
        {"every": 3, "parts": 2, "delay": 1},
    ),
    "outer_average, late": (
        lambda mix=0.0: gc.outer_average(dense(), optax.sgd(0.7), axis_name=AXIS, every=2, delay=1, mix=mix),
        {"mix": 0.5},
    ),
    "sparse_loco, late": (lambda mix=0.0: gc.sparse_loco(axis_name=AXIS, delay=2, mix=mix), {"mix": 0.5}),
    "elastic_average": (
        lambda **more: gc.elastic_average(dense(), axis_name=AXIS, **more),
        {"every": 2, "beta": 0.5, "alpha": 0.1},
    ),
    "gossip": (drawing, {"every": 2, "graph": "exponential", "compressor": None, "key": 7}),
    "bucketed": (
        lambda bucket_bytes=1 << 30, **more: gc.bucketed(selection(), bucket_bytes=bucket_bytes, **more),
        {"bucket_bytes": 1000},
    ),
    "bucketed, in order": (
        lambda **more: gc.bucketed(selection(), bucket_bytes=1000, **more),
        {"forward_order": ("w", "v")},
    ),
    "rate_weighted": (
        lambda rate=lambda step: 0.1 + 0.0 * step.astype(jnp.float32): gc.rate_weighted(selection(), rate),
        {"rate": falling},
    ),
    "density_schedule": (
        lambda schedule=lambda step: jnp.float32(0.2), **more: gc.density_schedule(
            DENSITIES, schedule, axis_name=AXIS, **more
        ),
        {"schedule": falling, **{name: CONTROLLED[name] for name in ("memory", "collective", "mask", "make")}},
    ),
    "density_controller": (
        lambda target_error=0.5, **more: gc.density_controller(DENSITIES, target_error, axis_name=AXIS, **more),
        {"target_error": 0.25, **CONTROLLED},
    ),
    "local_clip": (lambda max_norm=1.0: gc.local_clip(max_norm, axis_name=AXIS), {"max_norm": 2.0}),
    "dynamic_loss_scale": (
        lambda **more: gc.dynamic_loss_scale(dense(), **more),
        {"initial": 8.0, "growth_interval": 7, "factor": 4.0, "minimum": 2.0, "maximum": 64.0},
    ),
}
POSITIONAL = {"method", "inner", "exchange", "optimizer", "densities", "axis_name"}
"""What is not an option."""


def program(tx: Any) -> str:
    """The first state of every worker and an update, traced."""

    def worker(params: Any, gradient: Any) -> Any:
        state = tx.init(params)
        return state, tx.update(gradient, state, params)

    each = jax.tree.map(lambda p: jax.ShapeDtypeStruct((N, *p.shape), p.dtype), PARAMS)
    return jax.jit(jax.vmap(worker, axis_name=AXIS)).lower(each, each).as_text()


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", CASES)
def test_every_option_is_heard(name: str) -> None:
    make, others = CASES[name]
    plain = program(make())
    # A text that changes by itself would show nothing.
    assert program(make()) == plain
    assert [option for option, value in others.items() if program(make(**{option: value})) == plain] == []


@pytest.mark.parametrize("name", [name for name in CASES if hasattr(gc, name)])
def test_all_options_are_in_the_table(name: str) -> None:
    tried = {option for other, (_, options) in CASES.items() if other.split(",")[0] == name for option in options}
    assert tried == inspect.signature(getattr(gc, name)).parameters.keys() - POSITIONAL
