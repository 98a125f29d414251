"""The methods of the sweep, all in the same chain: local clipping, the exchange, SGD with momentum."""

from typing import Any, NamedTuple

import optax

import gradcomp_jax as gc
from gradcomp_jax.experiments.registered import RATES
from gradcomp_jax.methods.registry import METHODS as REGISTRY

from .tasks import Task

AXIS = "data"
NOTHING = "nothing"
"""The step without any exchange: what is left of it is computation."""


class Choice(NamedTuple):
    """Attributes: a registered method and the options that it does not have by default."""

    name: str
    options: dict[str, Any] = {}  # noqa: RUF012


METHODS = {
    "dense": Choice("dense"),
    "dense-bf16": Choice("dense_bf16"),
    "block-quantized": Choice("block_quantized"),
    "block-quantized-int4": Choice("block_quantized", {"bits": 4}),
    "terngrad": Choice("terngrad"),
    "ef-sign-sgd": Choice("ef_sign_sgd"),
    "powersgd": Choice("powersgd"),
    "dgc": Choice("dgc", {"density": 1e-3}),
}
BASELINES = ("dense", "dense-bf16")


def transformation(name: str, task: Task, *, axis_name: str | None) -> optax.GradientTransformation:
    """The whole chain; without an axis, one worker's local round trip through the same code."""
    before = gc.local_clip(task.clip_norm, axis_name=axis_name)
    if name == NOTHING:
        return optax.chain(before, optax.sgd(task.learning_rate, momentum=task.momentum))
    choice = METHODS[name]
    method = REGISTRY[choice.name]
    options = {**choice.options, "momentum": task.momentum} if method.momentum == "inside" else choice.options
    after = None if method.momentum == "inside" else task.momentum
    rate = task.learning_rate * RATES.get(choice.name, 1.0)
    return optax.chain(before, method.build(axis_name=axis_name, **options), optax.sgd(rate, momentum=after))
