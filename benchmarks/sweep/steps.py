"""One worker's compiled steps: with an exchange over all processes, or alone."""

import time
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

import gradcomp_jax as gc

from .methods import AXIS, transformation
from .tasks import Batch, Task


class Taken(NamedTuple):
    """One step of one worker. Attributes: ``time.monotonic()`` before and after, and the worker's own loss in nats."""

    start: float
    end: float
    loss: float


class Exchanging:
    """The train step of a method over all workers. Its state stays from call to call.

    Attributes:
        facts: bytes that one worker sends and receives in a step, and how many collectives of each kind it runs, read
            from the compiled program.
    """

    def __init__(self, name: str, task: Task, params: Any, mesh: Mesh, batch: Batch) -> None:
        tx = transformation(name, task, axis_name=AXIS)
        self._sharding = gc.data_sharding(mesh, axis_name=AXIS)
        self._state = gc.init_state(params, tx, mesh, axis_name=AXIS)
        # The mean loss would cost an all-reduce of its own, which on long links takes as long as an exchange.
        step = gc.make_train_step(task.loss, tx, mesh, axis_name=AXIS, mean_metrics=False)
        self._step = step.lower(self._state, self._place(batch)).compile()
        report = gc.wire_bytes(self._step)
        self.facts = {
            "sent": report.sent,
            "received": report.received,
            "collectives": {kind: total.count for kind, total in report.by("kind").items()},
        }

    def __call__(self, batch: Batch, at: float) -> Taken:
        placed = jax.block_until_ready(self._place(batch))
        start = wait_until(at)
        self._state, metrics = self._step(self._state, placed)
        jax.block_until_ready((self._state, metrics))
        return Taken(start, time.monotonic(), float(metrics["loss"].addressable_data(0)[0]))

    def _place(self, batch: Batch) -> Any:
        return jax.tree.map(lambda part: jax.make_array_from_process_local_data(self._sharding, part), batch)


class Alone:
    """The same step on this worker's device, where nothing crosses: computation, and what a method adds to it.

    The state is made at the first step and dropped by :meth:`release`: there is not the memory for all methods' at once.
    """

    def __init__(self, name: str, task: Task, params: Any, batch: Batch) -> None:
        self._tx = transformation(name, task, axis_name=None)
        self._params = params
        self._state: Any = None

        def step(params: Any, state: Any, batch: Any) -> Any:
            loss, gradient = jax.value_and_grad(task.loss)(params, batch)
            updates, state = self._tx.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, loss

        state = jax.eval_shape(self._tx.init, params)
        self._step = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch).compile()

    def __call__(self, batch: Batch, at: float) -> Taken:
        if self._state is None:
            # Copies: the step donates them.
            self._state = jax.jit(lambda p: (jax.tree.map(lambda a: a + 0, p), self._tx.init(p)))(self._params)
        placed = jax.block_until_ready(jax.tree.map(jax.numpy.asarray, batch))
        start = wait_until(at)
        *self._state, loss = self._step(*self._state, placed)
        jax.block_until_ready(self._state)
        return Taken(start, time.monotonic(), float(loss))

    def release(self) -> None:
        self._state = None


def wait_until(at: float) -> float:
    """Sleeps until ``time.monotonic()`` is ``at``, a moment that all processes of a machine share; returns the time."""
    time.sleep(max(0.0, at - time.monotonic()))
    return time.monotonic()
