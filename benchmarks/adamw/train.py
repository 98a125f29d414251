"""One run: all workers on one device, a hundred steps a program, what is left of it when it is stopped."""

import dataclasses
import functools
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradcomp_jax as gc
from benchmarks.adamw.rows import AXIS, Row
from benchmarks.adamw.task import MODELS, Task, batch_of, judge, parts, vocabulary
from gradcomp_jax.experiments.machine import machine
from gradcomp_jax.experiments.settings import WARM_UP

CHUNK = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What tells one run from another.

    Attributes:
      row: a name of ``rows.ROWS``.
      rate: the peak of the learning rate.
      steps: of the whole run.
      seed: of the parameters and the batches.
    """

    row: str
    rate: float
    steps: int
    seed: int

    @property
    def name(self) -> str:
        """Returns the name of the file of its result."""
        row = re.sub(r"[^a-zA-Z0-9.]+", "-", self.row)
        return f"{row}-rate-{self.rate:g}-steps-{self.steps}-seed-{self.seed}"


def schedule(rate: Any, steps: int) -> optax.Schedule:
    """Returns the learning rate by step; its peak may be traced."""
    shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, round(WARM_UP * steps), steps)
    return lambda step: rate * shape(step)


def train(
    task: Task, run: Run, row: Row, saved: pathlib.Path, *, until: float, every_s: float = 120.0
) -> dict[str, Any] | None:
    """Trains a run to its end and returns its result; ``None`` if ``until``, a time, comes first: then it goes on from there.

    Args:
      task: what is trained.
      run: which run.
      row: what its name stands for.
      saved: the folder of what is left of it.
      until: a ``time.time()``.
      every_s: seconds from one save to the next.
    """
    tx = row.make(schedule(run.rate, run.steps), run.steps)
    model = MODELS[task.model]
    params = model.init(jax.random.key(run.seed), vocabulary(task.text))
    state = _started(params, tx, task.workers, replicas=row.replicas)
    losses = np.zeros(run.steps // CHUNK, np.float32)
    at = {"step": np.int32(0), "seconds": np.float64(0), "losses": losses, "state": state}
    if saved.exists():
        at = gc.restore_checkpoint(saved, at)
    chunk = _chunk(task, row, run.steps)
    text, rate, key = jnp.asarray(parts(task.text)["train"]), jnp.float32(run.rate), jax.random.key(1000 + run.seed)
    began = last = time.time()
    before = float(at["seconds"])
    while at["step"] < run.steps:
        state, loss = chunk(at["state"], text, rate, key, jnp.int32(at["step"]))
        losses = np.array(at["losses"])
        losses[at["step"] // CHUNK] = loss = float(loss)
        now = time.time()
        step = np.int32(at["step"] + CHUNK)
        at = {"step": step, "seconds": np.float64(before + now - began), "losses": losses, "state": state}
        if not np.isfinite(loss):
            break
        if step < run.steps and (now > until or now > last + every_s):
            gc.save_checkpoint(saved, at, overwrite=True)
            last = now
            if now > until:
                return None
    trained, _ = at["state"]
    if row.replicas:
        trained = jax.tree.map(lambda p: jnp.mean(p, axis=0), trained)
    bits = judge(task)
    return {
        "run": dataclasses.asdict(run),
        "task": task.name,
        "validation": bits(trained, "validation"),
        "test": bits(trained, "test"),
        "train": [round(float(x), 4) for x in losses],
        "seconds": round(float(at["seconds"])),
        "processor": machine()["processor"],
        "versions": {"jax": jax.__version__, "optax": optax.__version__},
    }


def _started(params: Any, tx: Any, workers: int, *, replicas: bool) -> Any:
    """Parameters and optimizer state of all workers on one device."""
    if replicas:
        params = jax.tree.map(lambda p: jnp.broadcast_to(p, (workers, *p.shape)), params)
        state = jax.jit(jax.vmap(tx.init, axis_name=AXIS))(params)
        return params, state
    axes = gc.state_axes(jax.eval_shape(tx.init, params))
    init = jax.vmap(tx.init, in_axes=None, out_axes=axes, axis_name=AXIS, axis_size=workers)
    return params, jax.jit(init)(params)


def _chunk(task: Task, row: Row, steps: int) -> Callable[..., tuple[Any, jax.Array]]:
    """Returns ``chunk(carry, text, rate, key, first)``: one program for all rates and seeds."""
    loss = MODELS[task.model].loss

    def step(text: jax.Array, rate: jax.Array, key: jax.Array, carry: Any, number: jax.Array) -> tuple[Any, jax.Array]:
        tx = row.make(schedule(rate, steps), steps)
        params, state = carry
        batch = batch_of(task, text, key, number)
        axes = 0 if row.replicas else gc.state_axes(state)
        of_params = 0 if row.replicas else None

        # One worker after another: XLA:CPU is faster at small products that are not batched.
        def of_worker(own: Any) -> tuple[jax.Array, Any]:
            own, tokens = own if row.replicas else (params, own)
            return jax.value_and_grad(loss)(own, tokens)

        values, gradients = jax.lax.map(of_worker, (params, batch) if row.replicas else batch)

        def worker(params: Any, state: Any, gradients: Any) -> Any:
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        mapped = jax.vmap(worker, (of_params, axes, 0), (of_params, axes), axis_name=AXIS)
        params, state = mapped(params, state, gradients)
        return (params, state), jnp.mean(values)

    @functools.partial(jax.jit, donate_argnums=0)
    def chunk(carry: Any, text: jax.Array, rate: jax.Array, key: jax.Array, first: jax.Array) -> Any:
        carry, values = jax.lax.scan(functools.partial(step, text, rate, key), carry, first + jnp.arange(CHUNK))
        return carry, jnp.mean(values)

    return chunk
