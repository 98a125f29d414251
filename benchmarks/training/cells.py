"""What is trained: a study is methods on a task, each tuned on the same grid and then run with several seeds."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from gradcomp_jax.experiments.settings import Settings, split_batch
from gradcomp_jax.experiments.tasks import task


@dataclasses.dataclass(frozen=True)
class Row:
    """A method as a table names it: ``every`` and ``density`` are the task's own where they are None."""

    method: str
    every: int | None = None
    density: float | None = None

    def __str__(self) -> str:
        """Returns ``diloco-every-30``, or ``dgc-density-0.001``."""
        options = {"every": self.every, "density": self.density}
        return self.method + "".join(f"-{name}-{value:g}" for name, value in options.items() if value is not None)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        task: a name of ``tasks.TASKS``.
        row: the method.
        workers: that share the task's batch.
        seed: of the run.
        learning_rate: of the run.
        tuning: whether it is judged by the validation part, in the place of the test part, and half as long.
    """

    task: str
    row: Row
    workers: int
    seed: int
    learning_rate: float
    tuning: bool = False

    @property
    def name(self) -> str:
        """Returns the name of its files."""
        kind = "tuning" if self.tuning else f"seed-{self.seed}"
        return f"{self.row}-workers-{self.workers}-rate-{self.learning_rate:g}-{kind}"

    def settings(self) -> Settings:
        """Returns its hyper-parameters."""
        own = task(self.task).settings
        given: dict[str, Any] = {k: v for k in ("every", "density") if (v := getattr(self.row, k)) is not None}
        if self.tuning:
            given["epochs"] = max(1, own.epochs // 2)
        return dataclasses.replace(
            own,
            workers=self.workers,
            batch_per_worker=split_batch(own.batch, self.workers),
            learning_rate=self.learning_rate,
            **given,
        )


@dataclasses.dataclass(frozen=True)
class Study:
    """A table: methods on a task.

    Attributes:
        task: a name of ``tasks.TASKS``.
        rows: by the number of workers, the methods, the baseline first. The first number has all of the methods.
        grid: fractions of the task's learning rate; the best of them on the validation part, by one run of half the length, is
            what a method is trained at. A method is tuned at the first of its rows.
        seeds: how many.
    """

    task: str
    rows: Mapping[int, tuple[Row, ...]]
    grid: tuple[float, ...] = (0.5, 1.0, 2.0)
    seeds: int = 3

    @property
    def methods(self) -> list[str]:
        """Returns the names of the methods, each once."""
        return list(dict.fromkeys(row.method for row in self.most[1]))

    @property
    def most(self) -> tuple[int, tuple[Row, ...]]:
        """Returns the first number of workers and its rows."""
        return next(iter(self.rows.items()))

    def tuning(self, method: str) -> list[Cell]:
        """Returns the runs that a method's learning rate is taken from."""
        workers, rows = self.most
        row = next(row for row in rows if row.method == method)
        rate = task(self.task).settings.learning_rate
        return [Cell(self.task, row, workers, 0, rate * fraction, tuning=True) for fraction in self.grid]

    def cells(self, found: Mapping[str, Mapping[str, Any]]) -> Iterator[Cell]:
        """Yields what is to be run, in order: each method is tuned, then everything is run with a seed before the next seed.

        ``found`` are the results so far by the names of the cells; it is read again whenever a rate must be known.
        """
        for method in self.methods:
            yield from self.tuning(method)
        for seed in range(self.seeds):
            for workers, rows in self.rows.items():
                for row in rows:
                    rate = self.rate(row.method, found)
                    if rate is not None:
                        yield Cell(self.task, row, workers, seed, rate)

    def rate(self, method: str, found: Mapping[str, Mapping[str, Any]]) -> float | None:
        """Returns the learning rate of a method, or None where it is not tuned yet."""
        tried = self.tuning(method)
        if any(cell.name not in found for cell in tried):
            return None
        return min(tried, key=lambda cell: penalty(found[cell.name])).learning_rate


def penalty(result: Mapping[str, Any]) -> float:
    """Returns a number that is lower for a better run, infinite for one that diverged."""
    last = result["evaluation"][-1]
    if last is None:
        return math.inf
    return -last if result["metric"] == "accuracy" else last


def metric_of(result: Mapping[str, Any], epoch: int = -1) -> float:
    """Returns the metric after an epoch, by default the last; NaN where the run had diverged."""
    value = result["evaluation"][epoch]
    return math.nan if value is None else value


_REPLICAS = ("diloco", "streaming-diloco", "sparse-loco", "muloco")
_EVERY_STEP = (Row("delayed-int8", 1), Row("dion"))

STUDIES: dict[str, Study] = {
    "enwik8-replicas": Study(
        "enwik8",
        {
            8: (
                Row("dense-bf16"),
                *(Row(method, every) for method in _REPLICAS for every in (30, 15, 100)),
                *_EVERY_STEP,
            ),
            4: (Row("dense-bf16"), *(Row(method, 30) for method in _REPLICAS), *_EVERY_STEP),
        },
    ),
}
