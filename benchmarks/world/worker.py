"""One worker process: ``python -m benchmarks.world.worker COORDINATOR WORKERS INDEX MODEL``.

It obeys lines of JSON on standard input, and answers each with one on standard output.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


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
    from benchmarks.world.strategies import STRATEGIES, steps_of
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
        tx, step, replicas = steps_of(STRATEGIES[name], task, mesh)
        running["step"] = step
        running["state"] = gc.init_state(everywhere, tx, mesh, axis_name=AXIS, replicas=replicas)
        return {}

    def stretch(first: int, count: int, parts: int, at: float) -> Any:
        """Steps one after the other, as a training loop takes them; each waits for the one before.

        Returns the moments at which it began and at which each part, of so many steps, was done.
        """
        step, state = running["step"], running["state"]
        moments = [wait_until(at)]
        for number in range(first, first + parts * count):
            batch = jax.tree.map(
                lambda part: jax.make_array_from_process_local_data(sharding, part), batches(number, index, workers)
            )
            state, _ = jax.block_until_ready(step(state, batch))
            if (number - first + 1) % count == 0:
                moments.append(time.monotonic())
        running["state"] = state
        return moments

    def settle() -> Any:
        wait = getattr(running["step"], "wait", None)
        if wait is not None:
            wait()
        return {}

    orders: dict[str, Callable[..., Any]] = {"begin": begin, "stretch": stretch, "settle": settle}
    values = sum(leaf.size for leaf in jax.tree.leaves(params))
    facts = {"source": source, "values": values, "machine": machine.machine(), "versions": machine.versions()}
    print(json.dumps(facts), file=answers)
    for line in sys.stdin:
        order, *arguments = json.loads(line)
        print(json.dumps(orders[order](*arguments)), file=answers)
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
