"""How the metric of a method's runs goes, epoch by epoch, over their seeds."""

import collections
import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks import packed
from benchmarks.training.cells import Row, baselines, penalty, penalty_of_validation


@dataclasses.dataclass(frozen=True)
class Curves:
    """A method on a task, at one learning rate.

    Attributes:
        task: what was trained.
        method: a name of ``recipes.RECIPES``.
        options: of the row, such as ``{"every": 30}``, where they are not the task's.
        workers: that shared the task's batch.
        metric: ``accuracy``, of which more is better, or a loss.
        steps: of an epoch.
        values: by seed, the metric after every epoch; NaN from where it diverged.
        settings: of the run.
        sent: bytes that a device sends in a step, averaged over the run.
        warm_up: of these, what the stages of a warm-up add to those of a step after it.
    """

    task: str
    method: str
    options: Mapping[str, Any]
    workers: int
    metric: str
    steps: float
    values: Mapping[int, tuple[float, ...]]
    settings: Mapping[str, Any]
    sent: float
    warm_up: float = 0.0

    @property
    def name(self) -> str:
        """Returns ``diloco, every 30``."""
        return ", ".join([self.method, *shown(self.options)])

    @property
    def shared(self) -> dict[str, Any]:
        """Returns those of the options that are no method's: a run is compared to one that has them too."""
        return {name: self.options[name] for name in ("optimizer", "epochs") if name in self.options}

    @property
    def epochs(self) -> int:
        """Returns how many there are of every seed."""
        return min(map(len, self.values.values()))

    @property
    def mean(self) -> tuple[float, ...]:
        """Returns the mean over the seeds; NaN where one of them had diverged."""
        return tuple(statistics.fmean(v[i] for v in self.values.values()) for i in range(self.epochs))

    def best(self, values: Sequence[float] | None = None) -> tuple[float, ...]:
        """Returns the best so far of a curve, by default the mean, as numbers of which more is better."""
        sign, found, last = 1 if self.metric == "accuracy" else -1, [], -math.inf
        for value in self.mean if values is None else values:
            last = last if math.isnan(value) else max(last, sign * value)
            found.append(last)
        return tuple(found)


def shown(options: Mapping[str, Any]) -> list[str]:
    """Returns ``every 30`` for each option."""
    return [f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in options.items()]


def epochs_to(target: float, best: Sequence[float]) -> float:
    """Returns the epochs after which a curve of best values is at a target, between two epochs on a straight line.

    Infinity where it does not come that far. What came within the first epoch counts as one, because nothing is known of it.
    """
    for i, value in enumerate(best):
        if value >= target:
            before = best[i - 1] if i else -math.inf
            return i + (1.0 if math.isinf(before) else (target - before) / (value - before))
    return math.inf


def beside(workers: Iterable[int], number: int, of: int) -> list[float]:
    """Returns where one of several methods is drawn on a logarithmic axis of workers, so that no bar hides another's."""
    return [n * 2 ** (0.5 * (number - (of - 1) / 2) / of) for n in workers]


def of_runs(folder: pathlib.Path) -> list[Curves]:
    """Reads the runs of a task that ``benchmarks/accuracy.py`` has written, those that tune left out.

    Of a row that was run at several learning rates the one is taken that the tables have: the best on the validation part,
    where the first seed of each was judged by it; else the one that tuning found to be the best; without tuning the one with
    the most seeds.

    Raises:
        ValueError: for two runs that differ in something else than is read here.
    """
    groups: dict[str, dict[float, list[dict[str, Any]]]] = {}
    tuned: dict[tuple[str, float], float] = {}
    for name, run in packed.read(folder).items():
        if run["tuning"]:
            tuned[Row(**run["row"]).tuned, run["learning_rate"]] = penalty(run)
        else:
            row = json.dumps([_given(run), run["workers"]], sort_keys=True)
            same = groups.setdefault(row, collections.defaultdict(list))[run["learning_rate"]]
            if run["seed"] in [one["seed"] for one in same]:
                raise ValueError(f"{name} in {folder} has the row, workers, rate and seed of another run: take one out")
            same.append(run)

    def chosen(rates: Mapping[float, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        judged = all("validation" in runs[0] for runs in rates.values())

        def order(runs: list[dict[str, Any]]) -> tuple[float, float, int]:
            one = runs[0]
            by_tuning = tuned.get((Row(**one["row"]).tuned, one["learning_rate"]), math.inf)
            return penalty_of_validation(one) if judged else 0.0, by_tuning, -len(runs)

        return min(rates.values(), key=order)

    return [of_row(chosen(rates)) for rates in groups.values()]


def of_row(runs: Sequence[Mapping[str, Any]]) -> Curves:
    """Returns what runs of one row are together, one for each seed."""
    one = runs[0]
    options = {name: value for name, value in _given(one).items() if name != "method"}
    epochs = len(one["evaluation"])
    return Curves(
        one["task"],
        one["row"]["method"],
        options,
        one["workers"],
        one["metric"],
        10 * len(one["loss_of_ten_steps"]) / epochs,
        {run["seed"]: tuple(math.nan if v is None else v for v in run["evaluation"]) for run in runs},
        one["settings"],
        one["wire"]["sent_mean"],
        _warm_up(one["wire"]),
    )


def _warm_up(wire: Mapping[str, Any]) -> float:
    # Without stages the two differ by what exchanges now and then do.
    return wire["sent_mean"] - wire["sent"] if wire.get("stages") else 0.0


def _given(run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the row of a run names; one that was written earlier has fewer fields."""
    return {name: value for name, value in run["row"].items() if value is not None}


def of_comparison(path: pathlib.Path) -> list[Curves]:
    """Reads the JSON file that ``gradcomp compare --out`` has written."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    settings, found = kept["settings"], []
    for method in kept["methods"]:
        runs = method["runs"]
        values = {run["seed"]: tuple(math.nan if v is None else v for v in run["evaluation"]) for run in runs}
        steps = len(runs[0]["loss"]) / settings["epochs"]
        sent, workers, metric = method["wire"]["sent_mean"], settings["workers"], kept.get("metric", "accuracy")
        more = (metric, steps, values, settings, sent, _warm_up(method["wire"]))
        found.append(Curves(kept["dataset"], method["method"], {}, workers, *more))
    return found


def read(path: pathlib.Path) -> list[Curves]:
    """Reads a folder of runs, or the file of a comparison."""
    return of_comparison(path) if path.is_file() else of_runs(path)


def baseline(
    curves: Sequence[Curves], workers: int, shared: Mapping[str, Any] | None = None, *, of: str = "dense"
) -> Curves | None:
    """Returns the dense one of as many workers with these options, by default those of the task.

    The one that a method is held against; of dense itself that is the best there is.
    """
    dense = {one.method: one for one in curves if one.workers == workers and one.options == (shared or {})}
    return next((dense[name] for name in baselines(of) if name in dense), None)
