"""One worker process: ``python -m benchmarks.sweep.worker COORDINATOR WORKERS INDEX MODEL``.

It obeys lines of JSON on standard input, and answers each with one on standard output.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def main(coordinator: str, workers: int, index: int, model: str) -> None:
    # One core each: four processes with two threads each on two cores would wait for each other's threads.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})
    # What a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import jax

    jax.distributed.initialize(coordinator, workers, index)

    import gradcomp_jax as gc
    from benchmarks.sweep.methods import AXIS, NOTHING
    from benchmarks.sweep.steps import Alone, Exchanging
    from benchmarks.sweep.tasks import TASKS
    from gradcomp_jax.experiments import machine

    def answer(what: Any) -> None:
        print(json.dumps(what), file=answers)

    task = TASKS[model]
    source, batches = task.read()
    batch = batches(0, index, workers)
    params = task.init(batch)
    mesh = jax.make_mesh((workers,), (AXIS,))
    # Once for all methods: jax compares the processes' values, over the links.
    everywhere = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
    exchanging: dict[str, Exchanging] = {}
    alone: dict[str, Alone] = {}

    def compile(name: str) -> Any:
        alone[name] = Alone(name, task, params, batch)
        if name == NOTHING:
            return {}
        exchanging[name] = Exchanging(name, task, everywhere, mesh, batch)
        return exchanging[name].facts

    def step(name: str, number: int, at: float) -> Any:
        return exchanging[name](batches(number, index, workers), at)

    def step_alone(name: str, number: int, at: float) -> Any:
        return alone[name](batches(number, index, workers), at)

    def release() -> None:
        for one in alone.values():
            one.release()

    def calibrate(options: Any) -> Any:
        return gc.planning.calibrate(mesh, axis_name=AXIS, methods=(), **options).as_dict()

    orders: dict[str, Callable[..., Any]] = {
        "calibrate": calibrate,
        "compile": compile,
        "step": step,
        "step_alone": step_alone,
        "release": release,
    }
    values = sum(leaf.size for leaf in jax.tree.leaves(params))
    answer({"source": source, "values": values, "machine": machine.machine(), "versions": machine.versions()})
    for line in sys.stdin:
        order, *arguments = json.loads(line)
        answer(orders[order](*arguments))
    # Without the goodbyes of jax.distributed, which wait for everybody.
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
