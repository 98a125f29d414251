"""What is compared: how the workers keep together, with what exchange, how late and how seldom."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import optax

import gradcomp_jax as gc
from benchmarks.sweep.methods import AXIS
from benchmarks.sweep.tasks import Task

Exchange = Literal["dense", "int8", "dgc"]
OUTER = optax.sgd(0.7, 0.9, nesterov=True)


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How the workers train.

    Attributes:
        exchange: of gradients, or of how far replicas have moved.
        delay: steps until a mean arrives; 0 for none.
        every: steps from one exchange to the next.
        outer: whether the exchange is an outer step (DiLoCo) of the replicas.
    """

    exchange: Exchange
    delay: int = 0
    every: int = 1
    outer: bool = False


def _delayed(exchange: Exchange, *steps: int) -> dict[str, Strategy]:
    return {f"delayed {exchange}, t = p = {t}": Strategy(exchange, t, t) for t in steps}


STRATEGIES = {
    "synchronous dense": Strategy("dense"),
    "synchronous dgc": Strategy("dgc"),
    **_delayed("dense", 1, 4, 8, 20),
    **_delayed("int8", 8, 20),
    **_delayed("dgc", 8, 20),
    "diloco dense, H = 20": Strategy("dense", every=20, outer=True),
    "diloco int8, H = 20": Strategy("int8", every=20, outer=True),
}


def exchange(name: Exchange, task: Task) -> optax.GradientTransformationExtraArgs:
    """The link that communicates."""
    if name == "dense":
        return gc.dense(axis_name=AXIS)
    if name == "int8":
        return gc.block_quantized(axis_name=AXIS)
    return gc.dgc(axis_name=AXIS, density=0.01, momentum=task.momentum, clip_norm=task.clip_norm)


def own_steps(strategy: Strategy, task: Task) -> optax.GradientTransformation:
    """The optimizer: DGC's momentum is inside, but where replicas take steps of their own."""
    inside = strategy.exchange == "dgc" and not strategy.outer
    return optax.sgd(task.learning_rate, momentum=None if inside else task.momentum)


def steps_of(
    strategy: Strategy, task: Task, mesh: Any
) -> tuple[optax.GradientTransformation, Callable[..., Any], bool]:
    """Transformation, ``step(state, batch)`` and whether replicas differ."""
    link, optimizer = exchange(strategy.exchange, task), own_steps(strategy, task)
    if strategy.delay:
        step = gc.make_overlapped_step(
            task.loss, link, optimizer, mesh, axis_name=AXIS, delay=strategy.delay, every=strategy.every
        )
        return step.tx, step, True
    if strategy.outer:
        tx = optax.chain(optimizer, gc.outer_average(link, OUTER, axis_name=AXIS, every=strategy.every))
    else:
        tx = optax.chain(link, optimizer)
    return tx, gc.make_train_step(task.loss, tx, mesh, axis_name=AXIS, mean_metrics=False), strategy.outer
