"""What is compared: how the workers keep together, with what exchange, how late and how seldom."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import optax

import gradcomp_jax as gc
from benchmarks.sweep.methods import AXIS
from benchmarks.sweep.tasks import Task

Exchange = Literal["dense", "bfloat16", "int8", "int4", "dgc", "sparse"]
OUTER = optax.sgd(0.7, 0.9, nesterov=True)


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How the workers train.

    Attributes:
        exchange: of gradients, or of how far replicas have moved.
        delay: steps until a mean arrives; 0 for none.
        every: steps from one exchange to the next.
        outer: whether the exchange is an outer step (DiLoCo) of the replicas.
        parts: of the tree, with outer steps at different times.
        mix: a replica's own share of what it goes on from when a late outer step arrives.
        clip: whether each worker's own gradient is clipped before the exchange, as the language model needs it.
    """

    exchange: Exchange
    delay: int = 0
    every: int = 1
    outer: bool = False
    parts: int = 1
    mix: float = 0.0
    clip: bool = False

    @property
    def period(self) -> int:
        """Steps after which everything that happens in a step has happened equally often."""
        return max(self.every, self.delay, 1)


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
"""Of the first table."""

GOODPUT = {
    "dense float32": Strategy("dense"),
    "dense bfloat16": Strategy("bfloat16"),
    "delayed int8, t = p = 20": Strategy("int8", 20, 20),
    "DiLoCo float32, H = 100": Strategy("dense", every=100, outer=True),
    "streaming DiLoCo int4, H = 100": Strategy("int4", 10, 100, outer=True, parts=2, mix=0.5),
    "SparseLoCo, H = 30": Strategy("sparse", every=30, outer=True),
}
"""Of the second. Outer steps are as published but for the inner optimizer, which is the task's, and for parts: two, by size.
Streaming DiLoCo has a delay of 10 steps and a mix of one half; SparseLoCo sends one of 64 in two bits."""

_MOST: tuple[Exchange, ...] = ("dense", "bfloat16", "int8", "int4")
HIDING = {
    **{f"{name}, in sequence": Strategy(name, clip=True) for name in _MOST},
    **{f"{name}, a step late": Strategy(name, delay=1, clip=True) for name in _MOST},
}
"""Of the page about slow links: what sends the most, with nothing beside its exchange, and with the next gradient."""

EVERY = {**STRATEGIES, **GOODPUT, **HIDING}


def exchange(name: Exchange, task: Task) -> optax.GradientTransformationExtraArgs:
    """The link that communicates."""
    if name == "dense":
        return gc.dense(axis_name=AXIS)
    if name == "bfloat16":
        return gc.dense(axis_name=AXIS, dtype="bfloat16")
    if name in ("int8", "int4"):
        return gc.block_quantized(axis_name=AXIS, bits=int(name.removeprefix("int")))
    return gc.dgc(axis_name=AXIS, density=0.01, momentum=task.momentum, clip_norm=task.clip_norm)


def own_steps(strategy: Strategy, task: Task) -> optax.GradientTransformation:
    """The optimizer: DGC's momentum is inside, but where replicas take steps of their own."""
    inside = strategy.exchange == "dgc" and not strategy.outer
    return optax.sgd(task.learning_rate, momentum=None if inside else task.momentum)


def steps_of(
    strategy: Strategy, task: Task, mesh: Any
) -> tuple[optax.GradientTransformation, Callable[..., Any], bool]:
    """Transformation, ``step(state, batch)`` and whether replicas differ."""
    optimizer = own_steps(strategy, task)
    if strategy.exchange == "sparse":
        tx = optax.chain(optimizer, gc.sparse_loco(axis_name=AXIS, every=strategy.every))
        return tx, _one_program(task, tx, mesh), True
    link: optax.GradientTransformation = exchange(strategy.exchange, task)
    if strategy.clip:
        link = optax.chain(gc.local_clip(task.clip_norm, axis_name=AXIS), link)
    late: dict[str, Any] = {"axis_name": AXIS, "delay": strategy.delay, "every": strategy.every}
    if strategy.delay and strategy.outer:
        streaming: dict[str, Any] = {"parts": strategy.parts, "mix": strategy.mix}
        step = gc.make_overlapped_outer_step(task.loss, link, optimizer, OUTER, mesh, **late, **streaming)
        return step.tx, step, True
    if strategy.delay:
        step = gc.make_overlapped_step(task.loss, link, optimizer, mesh, **late)
        return step.tx, step, True
    if strategy.outer:
        tx = optax.chain(optimizer, gc.outer_average(link, OUTER, axis_name=AXIS, every=strategy.every))
    else:
        tx = optax.chain(link, optimizer)
    return tx, _one_program(task, tx, mesh), strategy.outer


def _one_program(task: Task, tx: optax.GradientTransformation, mesh: Any) -> Callable[..., Any]:
    return gc.make_train_step(task.loss, tx, mesh, axis_name=AXIS, mean_metrics=False)
