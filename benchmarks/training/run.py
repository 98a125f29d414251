"""Runs of a study, each in a process of its own that goes on where it was broken off, one or several at once."""

import concurrent.futures
import dataclasses
import fnmatch
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks import packed, tasks
from benchmarks.tasks.datasets import for_tuning, load
from benchmarks.tasks.tasks import task
from benchmarks.training.cells import Cell, Row, Study
from gradcomp_jax import experiments
from gradcomp_jax._files import write_whole
from gradcomp_jax.cli.runs import simulate
from gradcomp_jax.experiments.machine import machine, versions
from gradcomp_jax.training.checkpoint import restore_checkpoint

KEPT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
"""Environment variables by which glibc keeps the memory that a step has freed for the next one."""

MARK = "GRADCOMP_CELL"
"""Environment variable: the cell that a process is to run, as JSON."""


def results(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Reads what was run, by the names of the cells."""
    return packed.read(folder)


def run_all(
    study: Study,
    folder: pathlib.Path,
    checkpoints: pathlib.Path,
    *,
    hours: float,
    only: Sequence[str] = ("",),
    at_once: int = 1,
    one_device: bool = False,
) -> bool:
    """Runs what has no result yet, for as long as there is time; says whether everything has one.

    Args:
        study: what is run.
        folder: of the results, one file a run.
        checkpoints: a folder for the states of runs, one within it for each.
        hours: after which a run is stopped; the same call goes on later from its last epoch.
        only: parts of the names of the cells that are run, the first ones first; ``*`` within a part stands for anything.
        at_once: how many runs share the cores. The devices of one run wait for each other, so two runs on a core each are
            done sooner than one after the other on both.
        one_device: whether the workers of a run share the first device that JAX finds, such as a GPU; they have a CPU device
            each otherwise.
    """
    until = time.monotonic() + 3600 * hours
    folder.mkdir(parents=True, exist_ok=True)
    running: set[str] = set()
    failed: set[str] = set()
    choosing = threading.Lock()
    interrupted = threading.Event()

    def without_result() -> list[Cell]:
        found = results(folder)
        cells = [cell for cell in study.cells(found) if cell.name not in found]
        chosen = [cell for part in only for cell in cells if fnmatch.fnmatchcase(cell.name, f"*{part}*")]
        return list(dict.fromkeys(chosen))

    def choose() -> tuple[Cell | None, int]:
        """Takes the next cell, and counts those that have no result."""
        with choosing:
            cells = without_result()
            cell = next((cell for cell in cells if cell.name not in running | failed), None)
            if cell is not None:
                running.add(cell.name)
            return cell, len(cells)

    def lane(cores: str) -> None:
        while (left := until - time.monotonic()) > 0 and not interrupted.is_set():
            cell, number = choose()
            if cell is None:
                if not running:
                    return
                # A rate that others are waiting for may be among what runs.
                time.sleep(1)
                continue
            print(f"{time.strftime('%H:%M:%S')} {cell.name}; {number} left, {left / 3600:.1f} h", flush=True)
            # Seeds are in the state: those of a row run one program.
            cache = {"JAX_COMPILATION_CACHE_DIR": str(checkpoints.absolute() / "compiled")}
            environment = os.environ | KEPT | cache | {MARK: json.dumps(dataclasses.asdict(cell))}
            command = [
                sys.executable,
                "-m",
                "benchmarks.training.run",
                str(folder),
                str(checkpoints / cell.name),
                cores,
                *(["one-device"] if one_device else []),
            ]
            try:
                subprocess.run(command, env=environment, check=True, timeout=left)
            except subprocess.TimeoutExpired:
                pass
            except subprocess.CalledProcessError as error:
                # From the keyboard: the process may know of it before this one does.
                if error.returncode == -signal.SIGINT:
                    interrupted.set()
                print(f"{cell.name} failed (exit code {error.returncode}); the others go on", flush=True)
                failed.add(cell.name)
            # Not while another lane chooses: it may have looked for the result before that was there.
            with choosing:
                running.remove(cell.name)

    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        try:
            list(pool.map(lane, _shares(at_once)))
        except BaseException:
            interrupted.set()
            raise
    left = len(without_result())
    if left > len(failed):
        print(f"out of time; {left - len(failed)} runs that are known of are left", flush=True)
    return not left


def _shares(count: int) -> list[str]:
    """Returns the cores of each of so many lanes; empty where a lane has all, or where the system does not say."""
    cores = sorted(os.sched_getaffinity(0)) if count > 1 and hasattr(os, "sched_getaffinity") else []
    return [",".join(map(str, cores[i::count])) for i in range(count)]


def run_cell(cell: Cell, folder: pathlib.Path, checkpoint: pathlib.Path, *, one_device: bool = False) -> None:
    """Trains, or goes on, and writes the result."""
    if one_device:
        # Of float32, where a GPU would round to fewer bits.
        jax.config.update("jax_default_matmul_precision", "highest")
    else:
        simulate(cell.workers)
    the_task, settings = task(cell.task), cell.settings()
    data = load(the_task.dataset)
    problem = the_task.on(for_tuning(data) if cell.tuning else data)
    trainer = experiments.Trainer(cell.row.method, problem, settings, one_device=one_device)
    result = experiments.train_with_checkpoints(trainer, cell.seed, checkpoint, listener=Epochs(cell.name))
    validation = {}
    # Elsewhere the validation part is trained on.
    if isinstance(data, experiments.Text) and not cell.tuning:
        validation["validation"] = _finite(judged(trainer, cell.seed, checkpoint, the_task.on(for_tuning(data))))
    loss = result.loss
    blocks = [loss[i : i + 10] for i in range(0, len(loss), 10)]
    fields = {
        **dataclasses.asdict(cell),
        "metric": result.metric,
        "evaluation": [_finite(value) for value in result.evaluation],
        "loss_of_ten_steps": [_finite(sum(block) / len(block)) for block in blocks],
        "wire": dataclasses.asdict(result.wire),
        "step_s": _finite(result.step_time.median),
        "settings": dataclasses.asdict(settings),
        "one_device": one_device,
        **validation,
        "machine": machine(),
        "versions": versions(),
    }
    write_whole(folder / f"{cell.name}.json", json.dumps(fields, allow_nan=False) + "\n")


def judged(trainer: experiments.Trainer, seed: int, checkpoint: pathlib.Path, problem: experiments.Problem) -> float:
    """Returns what a problem's evaluation gives for the last state of a run that has had all its epochs."""
    last = checkpoint / f"epoch-{trainer.settings.epochs}"
    return trainer.evaluate(restore_checkpoint(last, trainer.initial_state(seed)).params, on=problem)


class Epochs(experiments.Listener):
    """Prints the metric of every epoch."""

    def __init__(self, run: str) -> None:
        self._run = run

    def finished_epoch(self, method: str, seed: int, epoch: int, past: experiments.Past) -> None:
        metric = past.metric
        value = experiments.show(metric, past.evaluation[-1])
        print(f"  {self._run}, epoch {epoch}: {metric} {value}", flush=True)


def _finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


if __name__ == "__main__":
    if sys.argv[3]:
        os.sched_setaffinity(0, map(int, sys.argv[3].split(",")))
    tasks.add()
    fields = json.loads(os.environ[MARK])
    the_cell = Cell(**{**fields, "row": Row(**fields["row"])})
    run_cell(the_cell, pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), one_device=sys.argv[4:] == ["one-device"])
