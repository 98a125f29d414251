"""What is trained: a study is methods on a task, each tuned on the same grid and then run with several seeds."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.tasks.tasks import task
from gradcomp_jax.experiments.settings import Settings, split_batch

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "momentum": 0.0},
    "adamw": {"optimizer": "adamw"},
}
"""Fields of ``Settings`` by what a row names."""
BASELINES = ("dense-bf16-clip", "dense-bf16", "dense")
"""The first that a task has is the best dense baseline there is."""

ADAMW_RATE = 1e-3
"""Learning rate that the grid of AdamW is about, in a task whose own optimizer is another."""


def baselines(method: str) -> tuple[str, ...]:
    """Returns what a method is held against, the first that a task has.

    DGC clips gradients, and so does its baseline. What does not clip is held against dense without clipping, and a baseline
    against the best: clipping costs no bytes, and every method can have it.
    """
    clips = method in BASELINES or (method.startswith("dgc") and method != "dgc-no-clip")
    return BASELINES if clips else (*BASELINES[1:], BASELINES[0])


@dataclasses.dataclass(frozen=True)
class Row:
    """A method as a table names it: options are the task's own where they are None."""

    method: str
    every: int | None = None
    density: float | None = None
    optimizer: str | None = None
    epochs: int | None = None

    def __str__(self) -> str:
        """Returns ``diloco-every-30``, or ``dgc-density-0.001``."""
        return self.name if self.every is None else f"{self.name}-every-{self.every}"

    @property
    def name(self) -> str:
        """Returns its name without ``every``."""
        given = {"density": self.density, "epochs": self.epochs}
        return "".join([self.tuned, *(f"-{name}-{value:g}" for name, value in given.items() if value is not None)])

    @property
    def tuned(self) -> str:
        """Returns what it shares a learning rate with: ``dgc``, or ``dgc-sgd``."""
        return self.method if self.optimizer is None else f"{self.method}-{self.optimizer}"

    def learning_rate(self, settings: Settings) -> float:
        """Returns the learning rate that its grid is about."""
        if self.optimizer == "adamw" != settings.optimizer:
            return ADAMW_RATE
        # A velocity is 1 / (1 - momentum) gradients long.
        return settings.learning_rate / (1 - settings.momentum if self.optimizer == "sgd" else 1.0)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        task: a name of ``tasks.TASKS``.
        row: the method.
        workers: that share the task's batch.
        seed: of the run.
        learning_rate: of the run.
        tuning: whether it is judged by the validation part, instead of the test part, and shorter.
        short: of a tuning run: its epochs are the task's over this.
    """

    task: str
    row: Row
    workers: int
    seed: int
    learning_rate: float
    tuning: bool = False
    short: int = 2

    @property
    def name(self) -> str:
        """Returns the name of its files."""
        kind = "tuning" if self.tuning else f"seed-{self.seed}"
        return f"{self.row}-workers-{self.workers}-rate-{self.learning_rate:g}-{kind}"

    def settings(self) -> Settings:
        """Returns its hyper-parameters."""
        own = task(self.task).settings
        given: dict[str, Any] = {
            k: v for k in ("every", "density", "epochs") if (v := getattr(self.row, k)) is not None
        }
        given |= OPTIMIZERS.get(self.row.optimizer or "", {})
        if self.tuning:
            given["epochs"] = max(1, given.get("epochs", own.epochs) // self.short)
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
        rows: by the number of workers, the methods. The first number has all of the methods.
        grid: fractions of the task's learning rate; the best of them on the validation part, by one shorter run, is what a
            method is trained at, with its optimizer. A method is tuned at the first of its rows.
        short: these runs have the task's epochs over this.
        close: rates that were less than this fraction worse than the best there go on: the first seed of a row is run with
            each, and the row has the one that is best on the validation part after all epochs. That needs a task with a
            validation part of its own; by default only the best goes on.
        seeds: how many.
        papers: what papers give for the task, and why that differs from ours.
        title: of the page, by default the study's name.
        note: what a reader has to know first.
    """

    task: str
    rows: Mapping[int, tuple[Row, ...]]
    grid: tuple[float, ...] = (0.5, 1.0, 2.0)
    short: int = 2
    close: float = 0.0
    seeds: int = 3
    papers: str = ""
    title: str = ""
    note: str = ""

    @property
    def tuned(self) -> list[str]:
        """Returns the names of the methods that have learning rates of their own."""
        return list(dict.fromkeys(row.tuned for row in self.most[1]))

    @property
    def most(self) -> tuple[int, tuple[Row, ...]]:
        """Returns the first number of workers and its rows."""
        return next(iter(self.rows.items()))

    def tuning(self, tuned: str) -> list[Cell]:
        """Returns the runs that the learning rate of a name of :attr:`tuned` is taken from."""
        workers, rows = self.most
        row = next(row for row in rows if row.tuned == tuned)
        rate = row.learning_rate(task(self.task).settings)
        return [
            Cell(self.task, row, workers, 0, rate * fraction, tuning=True, short=self.short) for fraction in self.grid
        ]

    def cells(self, found: Mapping[str, Mapping[str, Any]]) -> Iterator[Cell]:
        """Yields what is to be run, in order: each method is tuned, then everything is run with a seed before the next seed.

        Runs of the first seed that are to say which rate a row has come before.

        ``found`` are the results so far by the names of the cells; it is read again whenever a rate must be known.
        """
        for name in self.tuned:
            yield from self.tuning(name)
        for row in self.most[1]:
            last = self.last(row, found)
            yield from last if len(last) > 1 else ()
        for seed in range(self.seeds):
            for workers, rows in self.rows.items():
                for row in rows:
                    rate = self.rate(row, found)
                    if rate is not None:
                        yield Cell(self.task, row, workers, seed, rate)

    def last(self, row: Row, found: Mapping[str, Mapping[str, Any]]) -> list[Cell]:
        """Returns a row's first seed at the rates that tuning leaves, the best of them first; empty until it is tuned."""
        tried = self.tuning(row.tuned)
        if any(cell.name not in found for cell in tried):
            return []
        penalties = {cell.learning_rate: penalty(found[cell.name]) for cell in tried}
        first, *others = sorted(penalties, key=penalties.__getitem__)
        best = penalties[first]
        # Less than: without ``close`` one of two that are alike is enough, and what diverged is close to nothing.
        close = [rate for rate in others if penalties[rate] < best + self.close * abs(best)]
        return [Cell(self.task, row, self.most[0], 0, rate) for rate in (first, *close)]

    def rate(self, row: Row, found: Mapping[str, Mapping[str, Any]]) -> float | None:
        """Returns the learning rate of a row, or None where it is not known yet."""
        last = self.last(row, found)
        if len(last) < 2:
            return last[0].learning_rate if last else None
        if any("validation" not in found.get(cell.name, ()) for cell in last):
            return None
        return min(last, key=lambda cell: penalty_of_validation(found[cell.name])).learning_rate


def penalty(result: Mapping[str, Any]) -> float:
    """Returns a number that is lower for a better run, infinite for one that diverged."""
    return _penalty(result, result["evaluation"][-1])


def penalty_of_validation(result: Mapping[str, Any]) -> float:
    """Returns the same of the validation part after all epochs, where the result has that."""
    return _penalty(result, result["validation"])


def _penalty(result: Mapping[str, Any], value: float | None) -> float:
    if value is None:
        return math.inf
    return -value if result["metric"] == "accuracy" else value


def metric_of(result: Mapping[str, Any]) -> float:
    """Returns the metric after the last epoch; NaN where the run had diverged."""
    value = result["evaluation"][-1]
    return math.nan if value is None else value


_BASE = Row("dense-bf16")
_REPLICAS = ("diloco", "streaming-diloco", "sparse-loco", "muloco")
_EVERY_STEP = (Row("delayed-int8", 1), Row("dion"))
_TERNGRAD = (
    _BASE,
    Row("terngrad"),
    Row("terngrad-ternary"),
    Row("terngrad-no-clip"),
    Row("dgc"),
    Row("block-quantized"),
)
_TERNGRAD_PAPER = "[TernGrad](https://arxiv.org/abs/1705.07878)"
_DGC_PAPER = "[DGC](https://arxiv.org/abs/1712.01887)"
_PARTS_OF_DGC = tuple(Row(f"dgc-no-{part}") for part in ("correction", "masking", "warm-up", "clip"))

_TOO_FEW = (
    "These runs see {characters} characters a parameter, at a constant rate, where the loss still falls fast: what is a little"
    " slower than dense ends far above it. Before AdamW every method has Adam's first moment after it, which costs a selection"
    " or a low rank much more than it costs others, and outer steps were not tuned. Take from them what is close to dense even"
    " here, and nothing from what is far: [the protocol](protocol.md) has 8 to 125 characters a parameter, and counts where"
    " both have a method."
)
_FALLS = (
    " There, the gap of one method falls with the steps:\n\n![Loss above dense AdamW's against the steps of the"
    " run](protocol-steps.png)"
)

STUDIES: dict[str, Study] = {
    "mnist": Study(
        "mnist",
        {
            8: (
                *_TERNGRAD,
                *(dataclasses.replace(row, optimizer=name) for name in OPTIMIZERS for row in (_BASE, *_TERNGRAD[1:3])),
            ),
            **dict.fromkeys((64, 2, 32, 4, 16), _TERNGRAD),
        },
        seeds=5,
        papers=f"{_TERNGRAD_PAPER}: the same network stays within 0.2 points of float32 with 2 to 64 workers. The runs here are"
        " two passes over the data at a constant learning rate: seeds of one method differ by as much.",
    ),
    "cifar10": Study(
        "cifar10",
        {
            8: (
                _BASE,
                *(Row(name) for name in ("dgc", "dgc-two-bits", "dgc-paper", "terngrad", "topk-sgd")),
                *(Row(name) for name in ("block-quantized", "block-quantized-4-bit", "powersgd", "one-bit-sgd")),
                *_PARTS_OF_DGC,
                Row("dense-bf16-clip"),
                # How the distance from dense falls with the steps.
                *(Row(name, epochs=16) for name in ("dense-bf16", "dgc-paper", "terngrad")),
            ),
            **dict.fromkeys((4, 16, 32), (_BASE, Row("dgc-paper"), Row("terngrad"))),
        },
        grid=(0.25, 0.5, 1.0, 2.0),
        short=4,
        papers=f"{_DGC_PAPER}, ResNet-110, dense and DGC: 93.75 and 93.87% with 4 workers, 92.92 and 93.28 with 8, 93.14 and"
        " 93.20 with 16, 93.10 and 93.18 with 32. The network here has a 20th of those parameters and sees the data 8 or 16"
        " times, without augmentation: accuracies are lower. `dense-bf16-clip` clips the mean gradient at a norm of 8, the"
        " threshold that DGC's local clipping is given. None was as long when it was tuned: these runs are dense's to the bit."
        " `dgc-no-correction`, `dgc-no-masking` and `dgc-no-clip` ran with the downlink that `dgc` had before: half as many"
        " entries of a block again as a worker sends in the warm-up, and then one. With it `dgc` had 70.23 ± 0.98.",
    ),
    "cifar10-conv": Study(
        "cifar10-conv",
        {8: (_BASE, Row("dgc-paper"), Row("terngrad"))},
        grid=(0.25, 0.5, 1.0, 2.0),
        short=4,
        papers=f"{_TERNGRAD_PAPER}, a network twice as wide with Adam, 2 workers: 86.56% with float32, 85.64% with TernGrad."
        " The runs here are shorter, without augmentation, and with SGD.",
    ),
    "penn-treebank": Study(
        "penn-treebank",
        {
            4: (
                Row("dense-bf16-clip"),
                _BASE,
                *(Row(name) for name in ("dgc-paper", "gradient-dropping", "block-quantized")),
            )
        },
        grid=(0.5, 1.0, 2.0, 4.0, 8.0),
        short=6,
        # One epoch alone prefers rates at which the seeds of six are far apart.
        close=0.1,
        papers=f"{_DGC_PAPER}, two layers of 1,500 units: a perplexity of 72.30 dense and 72.24 with DGC. The layers here have"
        " 200 units, and see the text six times, without dropout. `dense-bf16-clip` clips the mean gradient at a"
        " norm of 1.6, the threshold that DGC's local clipping is given. DGC is held against it, and what does not clip"
        " against `dense-bf16`.",
    ),
    "too-few-steps": Study(
        "enwik8",
        {
            8: (
                _BASE,
                *(Row(name) for name in ("terngrad", "block-quantized", "block-quantized-4-bit", "powersgd")),
                *(Row(name, density=density) for density in (0.01, 0.001) for name in ("topk-sgd", "dgc")),
                *(Row(name) for name in ("eden", "eden-2-bit", "eden-1-bit", "one-bit-adam", "demo", "one-bit-sgd")),
                *(Row(name) for name in ("fp8", "qsgd", "stochastic-rounding", "ef-sign-sgd", "sign-sgd")),
                *(Row(name, density=0.01) for name in ("gradient-dropping", "ef21", "sparcml", "random-k")),
                *(Row(method, every) for method in _REPLICAS for every in (30, 15, 100)),
                *_EVERY_STEP,
                # What the outer optimizer of DiLoCo costs a short run: the mean instead of it.
                Row("local-sgd", 30),
            ),
            4: (_BASE, *(Row(method, 30) for method in (*_REPLICAS, "local-sgd")), *_EVERY_STEP),
            # How the distance from dense falls with the number of replicas.
            2: (_BASE, *(Row(method, 30) for method in ("diloco", "streaming-diloco", "local-sgd"))),
        },
        title="Too few steps",
        note=_TOO_FEW.format(characters="1.4") + _FALLS,
    ),
    # With two workers the distance of replicas from dense still falls when the runs above end.
    "enwik8-long": Study(
        "enwik8-long",
        dict.fromkeys((2, 8, 4), (_BASE, Row("streaming-diloco", 30))),
        note=_TOO_FEW.format(characters="2.9"),
    ),
}
