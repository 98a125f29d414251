"""Predicts the measured cells, none of which the prediction has seen."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import gradcomp_jax as gc
from benchmarks.sweep.bounds import choose
from benchmarks.sweep.links import as_read
from benchmarks.sweep.methods import BASELINES, METHODS, transformation
from benchmarks.sweep.tasks import TASKS
from gradcomp_jax.planning import Calibration, Device, Link, Workload, traffic
from gradcomp_jax.planning.predict import is_tie

NEAR = 1.1
"""How much slower than the fastest method a choice may be and still be right."""


@dataclasses.dataclass(frozen=True)
class Held:
    """A cell that was measured and predicted.

    Attributes:
        key: model, workers and link.
        measured: seconds of a step by method.
        predicted: likewise.
    """

    key: str
    measured: dict[str, float]
    predicted: dict[str, float]

    @property
    def errors(self) -> dict[str, float]:
        """Predicted over measured, less one."""
        return {name: self.predicted[name] / self.measured[name] - 1 for name in self.measured}

    @property
    def choice(self) -> str:
        """What the plan says to use."""
        return choose(self.predicted)

    @property
    def tie(self) -> bool:
        """Whether it says that dense and the best method take the same."""
        return is_tie(self.predicted, BASELINES)

    @property
    def right(self) -> bool:
        """Whether it says rightly to compress or not to, and chooses the best method or one close to it.

        Of a tie, whether the two are that close.
        """
        if self.tie:
            return 1 / NEAR < gain_of(self.measured) < NEAR
        agreed = (self.choice in BASELINES) == (choose(self.measured) in BASELINES)
        return agreed and self.slower <= NEAR

    @property
    def slower(self) -> float:
        """What the choice takes over what the fastest method does."""
        return self.measured[self.choice] / min(self.measured.values())


def gain_of(steps: Mapping[str, float]) -> float:
    """Returns what the better dense one takes over what the fastest method does."""
    dense = min(step for name, step in steps.items() if name in BASELINES)
    return dense / min(step for name, step in steps.items() if name not in BASELINES)


def held_out(cells: Sequence[Mapping[str, Any]], links: Sequence[Mapping[str, Any]], *, formulas: bool) -> list[Held]:
    """Predictions of all cells whose link was calibrated.

    Args:
        cells: of network.json.
        links: of planner.json: calibrations.
        formulas: use the link's rate and delay and the formulas of collectives in place of its calibration; a link without
            a rate or a delay has those of the calibrated link without both.
    """
    known = {
        (c["model"], c["workers"], c["rate"], c["delay_s"]): Calibration.from_dict(c["calibration"]) for c in links
    }
    computing, found = compute_times(cells), []
    for cell in sorted(cells, key=lambda c: (c["model"], c["workers"], as_read(c))):
        team = (cell["model"], cell["workers"])
        link = (*team, cell["rate"], cell["delay_s"])
        if link in known:
            base = known[*team, None, 0.0]
            alike = [c for c in cells if (c["model"], c["workers"]) == team]
            # The least, because the difference of two is what is asked.
            alone = {n: min(c["methods"][n]["alone_s"] for c in alike) for n in cell["methods"]}
            without = _Without(computing[team], alone)
            predicted = {
                n: _predict(cell, n, without, known[link], base if formulas else None) for n in cell["methods"]
            }
            measured = {n: m["step_s"] for n, m in cell["methods"].items()}
            found.append(Held(cell["key"], measured, predicted))
    return found


def compute_times(cells: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], float]:
    """Seconds of a step without a method, by model and workers: the median over the times at which it was timed."""
    times: dict[tuple[str, int], list[float]] = {}
    for c in cells:
        times.setdefault((c["model"], c["workers"]), []).append(c["nothing_s"])
    return {team: statistics.median(found) for team, found in times.items()}


@dataclasses.dataclass(frozen=True)
class _Without:
    """What a model's step takes on so many workers at once without an exchange, whatever the links.

    Attributes:
        compute: seconds of a step without a method.
        alone: seconds with a method's local round trip.
    """

    compute: float
    alone: dict[str, float]


def _predict(
    cell: Mapping[str, Any], name: str, without: _Without, calibration: Calibration, base: Calibration | None
) -> float:
    """A step: what it takes without an exchange, and the exchange."""
    compute, alone = without.compute, without.alone
    method, n = METHODS[name].name, cell["workers"]
    traffic = traffic_of(cell["model"], n, name)
    workload = Workload(compute, shapes_of(cell["model"]))
    # One worker's round trip; seconds, as copies at one copy a second.
    device = Device(8 * workload.values, {method: max(0.0, alone[name] - alone["dense"])})
    outer = Link(math.inf, 0.0)
    if base is not None:
        outer = _nominal(cell, base)
    return gc.predict(
        workload,
        gc.Cluster(n, outer),
        method,
        device=device,
        calibration=None if base is not None else calibration,
        traffic=lambda *_: traffic,
        # What was measured here are seconds.
        prices={},
    ).step


def _nominal(cell: Mapping[str, Any], base: Calibration) -> Link:
    fit = base.fits["all-reduce"]
    messages = 2 * (cell["workers"] - 1)
    rate = 1 / fit.beta if cell["rate"] is None else min(1 / fit.beta, cell["rate"] / 8)
    return Link(rate, cell["delay_s"] + fit.alpha / messages)


@functools.cache
def _params(model: str) -> Any:
    task = TASKS[model]
    batch = task.read()[1](0, 0, 2)
    return jax.eval_shape(lambda: task.init(batch))


def shapes_of(model: str) -> tuple[tuple[int, ...], ...]:
    """Shapes of a model of the sweep over links."""
    return tuple(leaf.shape for leaf in jax.tree.leaves(_params(model)))


@functools.cache
def traffic_of(model: str, workers: int, name: str) -> traffic.Traffic:
    """What a method of the sweep sends of it."""
    make = functools.partial(transformation, name, TASKS[model])
    return traffic.read(make, _params(model), workers)
