"""One worker process: ``python -m benchmarks.world.worker COORDINATOR WORKERS INDEX MODEL``.

It obeys lines of JSON on standard input, and answers each with one on standard output.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

STEP_TIMEOUT_S = 60.0
"""Longer than a compilation, a save and a pause."""


def main(coordinator: str, workers: int, index: int, model: str) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import jax

    jax.distributed.initialize(coordinator, workers, index)

    import gradcomp_jax as gc
    from benchmarks.sweep.methods import AXIS
    from benchmarks.sweep.steps import wait_until
    from benchmarks.sweep.tasks import TASKS
    from benchmarks.world.strategies import EVERY, steps_of
    from gradcomp_jax.experiments import machine

    task = TASKS[model]
    source, batches = task.read()
    params = task.init(batches(0, index, workers))
    mesh = jax.make_mesh((workers,), (AXIS,))
    sharding = gc.data_sharding(mesh, axis_name=AXIS)
    everywhere = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
    running: dict[str, Any] = {}

    def begin(name: str) -> Any:
        """One strategy at a time: there is not the memory for all of them."""
        running.clear()
        tx, step, replicas = steps_of(EVERY[name], task, mesh)
        running["step"] = step
        running["state"] = gc.init_state(everywhere, tx, mesh, axis_name=AXIS, replicas=replicas)
        return {}

    def placed(number: int) -> Any:
        """A step's batch, this worker's part of it."""
        return jax.tree.map(
            lambda part: jax.make_array_from_process_local_data(sharding, part), batches(number, index, workers)
        )

    def stretch(first: int, count: int, parts: int, at: float) -> Any:
        """Steps one after the other, as a training loop takes them; each waits for the one before.

        Returns the moments at which it began and at which each part, of so many steps, was done.
        """
        step, state = running["step"], running["state"]
        moments = [wait_until(at)]
        for number in range(first, first + parts * count):
            state, _ = jax.block_until_ready(step(state, placed(number)))
            if (number - first + 1) % count == 0:
                moments.append(time.monotonic())
        running["state"] = state
        return moments

    def settle() -> Any:
        wait = getattr(running["step"], "wait", None)
        if wait is not None:
            wait()
        return {}

    def train(first: int, until: int, saves: list[int], folder: str, at: float) -> Any:
        """Steps as a run that may lose a process takes them: with checkpoints, and the moment of each step in a file.

        A process that cannot go on ends, and with it this one.
        """
        step = running["step"]
        wait_until(at)
        remedy = "start all of them again"
        with (
            open(f"{folder}/steps-{index}", "a", buffering=1) as log,
            gc.distributed.Watchdog(step_timeout=STEP_TIMEOUT_S, remedy=remedy) as watchdog,
        ):
            for number in range(first, until):
                running["state"], _ = jax.block_until_ready(step(running["state"], placed(number)))
                log.write(f"{number} {time.monotonic()}\n")
                watchdog.beat()
                if number + 1 in saves:
                    # A save communicates as well.
                    settle()
                    gc.save_checkpoint(f"{folder}/saved", running["state"], overwrite=True)
                    watchdog.beat()
        return {}

    def restore(folder: str) -> Any:
        """Returns the number of the first step that is not in the checkpoint."""
        running["state"] = gc.restore_checkpoint(f"{folder}/saved", running["state"])
        return int(running["state"].step)

    orders: dict[str, Callable[..., Any]] = {
        "begin": begin,
        "stretch": stretch,
        "settle": settle,
        "train": train,
        "restore": restore,
    }
    facts = {
        "source": source,
        "values": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "batch": len(jax.tree.leaves(batches(0, index, workers))[0]),
        "machine": machine.machine(),
        "versions": machine.versions(),
    }
    print(json.dumps(facts), file=answers)
    for line in sys.stdin:
        order, *arguments = json.loads(line)
        print(json.dumps(orders[order](*arguments)), file=answers)
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
