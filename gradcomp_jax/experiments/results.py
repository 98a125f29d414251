"""What a run gives: its losses, its evaluations, the bytes that it sent and the time that it took."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from gradcomp_jax.experiments.settings import Settings

Metric: TypeAlias = Literal["accuracy", "evaluation loss", "training loss", "bits per character", "perplexity"]
"""What a network is judged by: the fraction of the test set that is right, in [0, 1]; the mean loss on evaluation batches;
where there are none, the mean loss of an epoch's steps; or the same of a test text, in bits or as e to its power in nats."""

# The first steps of a process still touch fresh memory: they are not timed.
_UNTIMED_STEPS = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Wire:
    """Bytes that one device sends, read from the compiled step.

    Attributes:
      sent: bytes per step at the final density.
      sent_mean: bytes per step, averaged over the run with its warm-up.
      sent_most: bytes of the largest step, the first one where there is a warm-up.
      stages: ``(steps, bytes per step)`` of each stage of the warm-up.
    """

    sent: int
    sent_mean: float
    sent_most: int
    stages: tuple[tuple[int, int], ...] = ()

    def sent_in(self, step: int) -> int:
        """Returns the bytes of step ``step``, from 1; of a method that does not exchange in each, their mean."""
        last = 0
        for steps, sent in self.stages:
            last += steps
            if step <= last:
                return sent
        return self.sent


@dataclasses.dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds from the start of a step until its results are ready; zeros where no step was timed."""

    median: float
    lower_quartile: float
    upper_quartile: float
    steps: int


@dataclasses.dataclass(frozen=True, slots=True)
class RunResult:
    """What one run gave.

    Attributes:
      method: a name of ``recipes.RECIPES``.
      dataset: a name of ``datasets.SOURCES``, or ``module:function`` of a task of the user's own.
      seed: of the initial parameters, the order of the examples and random rounding.
      settings: the hyper-parameters.
      loss: mean training loss of every step.
      evaluation: the metric after every epoch.
      wire: bytes sent.
      step_time: seconds per step.
      metric: what ``evaluation`` is.
    """

    method: str
    dataset: str
    seed: int
    settings: Settings
    loss: tuple[float, ...]
    evaluation: tuple[float, ...]
    wire: Wire
    step_time: StepTime
    metric: Metric = "accuracy"

    @property
    def final_evaluation(self) -> float:
        """Returns the metric after the last epoch."""
        return self.evaluation[-1]


def show(metric: Metric, value: float) -> str:
    """Returns a value of a metric as people write it: ``97.6%``, ``0.3142``."""
    return f"{value:.1%}" if metric == "accuracy" else f"{value:.4g}"


def step_time(seconds: Sequence[float]) -> StepTime:
    """Returns the quartiles over steps, without the first ones where there are more."""
    timed = seconds[_UNTIMED_STEPS:] or seconds
    if not timed:
        return StepTime(0.0, 0.0, 0.0, 0)
    lower, median, upper = np.percentile(timed, [25, 50, 75]).tolist()
    return StepTime(median, lower, upper, len(timed))
