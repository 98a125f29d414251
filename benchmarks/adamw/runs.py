"""Which runs there are, in what order, and several processes that share them out."""

import dataclasses
import fcntl
import fnmatch
import json
import pathlib
import time
from collections.abc import Container, Iterator, Sequence
from typing import Any

from benchmarks import packed
from benchmarks.adamw.rows import ROWS, Row
from benchmarks.adamw.task import Task
from benchmarks.adamw.train import Run, train
from gradcomp_jax._files import write_whole

SEEDS = (0, 1, 2)
MORE_SEEDS = (3, 4)
"""Of the rows that a claim is made for."""
TEN_SEEDS = {4_000: ("dense", "sparse_adamw, 0.02")}
"""Rows by their steps with ten seeds: after five the mean gap was within a goal, and too uncertain."""
ALL_SEEDS = range(10)


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """What was run.

    Attributes:
      task: what was trained.
      runs: what each gave, by its name.
    """

    task: Task
    runs: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, task: Task, folder: pathlib.Path) -> "Results":
        """Reads a folder of runs of a task."""
        return cls(task, packed.read(folder))

    def of(self, rows: Container[str]) -> "Results":
        """Returns the results of some rows."""
        return Results(self.task, {name: run for name, run in self.runs.items() if run["run"]["row"] in rows})

    def tried(self, name: str, row: Row) -> dict[float, float]:
        """Returns the losses on the validation part by rate, of the runs that a rate is chosen by."""
        runs = {rate: Run(name, rate, self.task.tuned_at, 0).name for rate in row.rates}
        return {rate: float(self.runs[run]["validation"]) for rate, run in runs.items() if run in self.runs}


def rates_left(name: str, row: Row, found: Results) -> list[float]:
    """Returns the rates to try next: the two in the middle, then the best one's neighbours, until both are worse."""
    tried = found.tried(name, row)
    task = found.task
    if not tried:
        return list(row.rates[task.first : task.first + 1 + task.tunes])
    if not task.tunes:
        return []
    best = row.rates.index(best_of(tried))
    return [rate for rate in row.rates[max(best - 1, 0) : best + 2] if rate not in tried]


def best_rate(name: str, row: Row, found: Results) -> float | None:
    """Returns the rate of the least loss on the validation part; ``None`` while a rate is left to try."""
    return None if rates_left(name, row, found) else best_of(found.tried(name, row))


def wanted(names: Sequence[str], found: Results) -> Iterator[Run]:
    """Yields the runs of rows: first their tuning, then one seed at each length, then the others."""
    for name in names:
        for rate in rates_left(name, ROWS[name], found):
            yield Run(name, rate, found.task.tuned_at, 0)
    for seed in (*SEEDS, *MORE_SEEDS):
        for steps in found.task.lengths:
            for name in names:
                rate = best_rate(name, ROWS[name], found)
                if rate is None or (seed in MORE_SEEDS and not (ROWS[name].claimed and steps == found.task.lengths[0])):
                    continue
                yield Run(name, rate, steps, seed)
    for steps, rows in TEN_SEEDS.items():
        for name in (name for name in names if name in rows and steps in found.task.lengths):
            if (rate := best_rate(name, ROWS[name], found)) is not None:
                yield from (Run(name, rate, steps, seed) for seed in ALL_SEEDS)


def run_all(
    task: Task, folder: pathlib.Path, saved: pathlib.Path, *, until: float, only: Sequence[str], steps: int
) -> bool:
    """Runs what has no result and is in no other process; says whether everything has one.

    Args:
        task: what is trained.
        folder: of the results.
        saved: folder of what is left of runs that are not complete.
        until: a ``time.time()``.
        only: patterns of rows.
        steps: the longest runs.
    """
    names = [name for pattern in only for name in ROWS if fnmatch.fnmatchcase(name, pattern)]
    folder.mkdir(parents=True, exist_ok=True)
    saved.mkdir(parents=True, exist_ok=True)
    elsewhere: set[str] = set()
    while True:
        found = Results.read(task, folder)
        runs = (run for run in wanted(names, found) if run.name not in found.runs and run.steps <= steps)
        run = next((run for run in runs if run.name not in elsewhere), None)
        if run is None:
            return not elsewhere
        with open(saved / f"{run.name}.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                elsewhere.add(run.name)
                continue
            began = time.time()
            result = train(task, run, ROWS[run.row], saved / run.name, until=until)
            if result is None:
                return False
            write_whole(folder / f"{run.name}.json", json.dumps(result, indent=1).encode())
            elsewhere.clear()
            print(f"{run.name}: {result['validation']:.4f} {time.time() - began:.0f} s", flush=True)


def best_of(losses: dict[float, float]) -> float:
    """Returns the rate of the least loss; NaN is above everything."""
    return min(losses, key=lambda rate: (not losses[rate] < 99, losses[rate]))
