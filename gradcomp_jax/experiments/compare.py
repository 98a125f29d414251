"""Several methods with equal hyper-parameters and the same seeds, side by side."""

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gradcomp_jax._errors import SettingError
from gradcomp_jax.experiments import recipes
from gradcomp_jax.experiments.listeners import Listener
from gradcomp_jax.experiments.machine import machine, versions
from gradcomp_jax.experiments.problem import Problem
from gradcomp_jax.experiments.results import Metric, RunResult, StepTime, Wire
from gradcomp_jax.experiments.resume import train_with_checkpoints
from gradcomp_jax.experiments.run import Trainer
from gradcomp_jax.experiments.settings import Settings

BASELINES = ("dense-bf16", "dense")
_FORMAT = 2


@dataclasses.dataclass(frozen=True, slots=True)
class MethodResult:
    """What the runs of one method gave together.

    Attributes:
      method: a name of ``recipes.RECIPES``.
      runs: one for each seed.
      evaluation_mean: mean over the seeds of the metric after the last epoch.
      evaluation_std: its standard deviation over the seeds (``n - 1``); 0 for one seed.
      wire: bytes that a device sends.
      ratio_bf16: bytes of the bfloat16 all-reduce over bytes of this method, per step.
      ratio_f32: the same for the float32 all-reduce.
      step_time: the median over the seeds of each figure.
    """

    method: str
    runs: tuple[RunResult, ...]
    evaluation_mean: float
    evaluation_std: float
    wire: Wire
    ratio_bf16: float
    ratio_f32: float
    step_time: StepTime


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """The result of :func:`compare`.

    Attributes:
      dataset: a name of ``datasets.SOURCES``, or ``module:function`` of a task of the user's own.
      settings: the hyper-parameters that all methods shared.
      seeds: what was run.
      methods: in the order that was asked for.
      baseline_bytes: bytes that a device sends in a step of each dense method.
      machine: where it was measured.
      versions: with what.
      metric: what methods are judged by.
    """

    dataset: str
    settings: Settings
    seeds: tuple[int, ...]
    methods: tuple[MethodResult, ...]
    baseline_bytes: dict[str, int]
    machine: dict[str, str | int]
    versions: dict[str, str]
    metric: Metric = "accuracy"

    def to_dict(self, *, command: str = "") -> dict[str, Any]:
        """Returns everything as plain values, with the command line that produced it."""
        fields = dataclasses.asdict(self)
        for method in fields["methods"]:
            for name in ("evaluation_mean", "evaluation_std"):
                method[name] = _finite(method[name])
            for run in method["runs"]:
                run["loss"] = [_finite(float(f"{loss:.5g}")) for loss in run["loss"]]
                run["evaluation"] = [_finite(value) for value in run["evaluation"]]
                # The same for every run, and stated once for the method or the comparison.
                for name in ("method", "dataset", "settings", "wire", "metric"):
                    del run[name]
        return {"format": _FORMAT, "command": command, **fields}

    def to_json(self, *, command: str = "") -> str:
        """Returns :meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(command=command), allow_nan=False)


def compare(
    problem: Problem,
    methods: Sequence[str],
    *,
    seeds: Sequence[int],
    settings: Settings | None = None,
    listener: Listener | None = None,
    checkpoint: pathlib.Path | None = None,
    one_device: bool = False,
) -> Comparison:
    """Trains every method with every seed, and counts its bytes against both dense baselines.

    Seeds are the outer loop, so that a machine whose speed drifts is unfair to no method. A step is compiled once for
    each method. A baseline that is not among ``methods`` is compiled for its bytes and not trained.

    Methods are names of ``recipes.RECIPES``; the settings are those of the problem by default. With ``checkpoint``, a folder,
    each run saves in ``METHOD-seed-SEED`` within it, continues from there, and is only read when it was complete.
    ``one_device`` is that of :class:`Trainer`.
    """
    settings = settings or problem.settings
    for kind, values in (("methods", methods), ("seeds", seeds)):
        if not values:
            raise SettingError(f"{kind} must not be empty")
        if len(set(values)) < len(values):
            listed = ", ".join(map(str, values))
            raise SettingError(f"{kind} must differ from each other, got {listed}")
    if len(seeds) > 1 and not problem.has_seeds:
        raise SettingError(
            f"{problem.name} takes no seed, so all runs of a method would be one run: give it an argument seed, or ask for one"
            " seed"
        )
    for method in methods:
        # What it refuses, it refuses before any other is compiled.
        recipes.build(method, settings, problem.steps_per_epoch(settings))

    how: dict[str, Any] = {"listener": listener, "one_device": one_device}
    trainers = {method: Trainer(method, problem, settings, **how) for method in methods}
    baseline_bytes = count_baselines(problem, settings, known=trainers.values(), **how)
    runs = [
        train_with_checkpoints(trainer, seed, checkpoint and checkpoint / f"{method}-seed-{seed}", listener=listener)
        for seed in seeds
        for method, trainer in trainers.items()
    ]
    return summarize(runs, baseline_bytes, one_device=one_device)


def count_baselines(
    problem: Problem,
    settings: Settings,
    *,
    known: Iterable[Trainer] = (),
    listener: Listener | None = None,
    one_device: bool = False,
) -> dict[str, int]:
    """Returns the bytes that a device sends in a step of each dense method; ``known`` trainers are compiled already."""
    sent = {trainer.method: trainer.wire.sent for trainer in known}
    for name in BASELINES:
        if name not in sent:
            sent[name] = Trainer(name, problem, settings, listener=listener, one_device=one_device).wire.sent
    return {name: sent[name] for name in BASELINES}


def summarize(runs: Sequence[RunResult], baseline_bytes: dict[str, int], *, one_device: bool = False) -> Comparison:
    """Puts runs (at least one) with equal settings side by side; methods keep the order in which they first appear."""
    by_method: dict[str, list[RunResult]] = {}
    for run in runs:
        by_method.setdefault(run.method, []).append(run)
    return Comparison(
        dataset=runs[0].dataset,
        settings=runs[0].settings,
        seeds=tuple(dict.fromkeys(run.seed for run in runs)),
        methods=tuple(_summarize(group, baseline_bytes) for group in by_method.values()),
        baseline_bytes=baseline_bytes,
        machine=machine() | ({"one_device": True} if one_device else {}),
        versions=versions(),
        metric=runs[0].metric,
    )


def _summarize(runs: Sequence[RunResult], baseline_bytes: dict[str, int]) -> MethodResult:
    # Of a run that diverged it may be infinite, and the mean and the deviation are then no numbers, without a warning.
    evaluation = [run.final_evaluation if math.isfinite(run.final_evaluation) else math.nan for run in runs]
    times = [run.step_time for run in runs]
    wire = runs[0].wire
    return MethodResult(
        method=runs[0].method,
        runs=tuple(runs),
        evaluation_mean=float(np.mean(evaluation)),
        evaluation_std=float(np.std(evaluation, ddof=1)) if len(evaluation) > 1 else 0.0,
        wire=wire,
        ratio_bf16=_ratio(baseline_bytes["dense-bf16"], wire.sent),
        ratio_f32=_ratio(baseline_bytes["dense"], wire.sent),
        step_time=StepTime(
            median=statistics.median(time.median for time in times),
            lower_quartile=statistics.median(time.lower_quartile for time in times),
            upper_quartile=statistics.median(time.upper_quartile for time in times),
            steps=sum(time.steps for time in times),
        ),
    )


def _finite(value: float) -> float | None:
    """Returns no value where there is none: JSON knows no NaN."""
    return value if math.isfinite(value) else None


def _ratio(baseline: int, sent: int) -> float:
    # One worker sends nothing, whatever the method.
    return baseline / sent if sent else 1.0
