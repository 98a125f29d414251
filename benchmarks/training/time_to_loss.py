"""Seconds to a loss, composed: steps that a run took, times what a step would take over a link."""

import dataclasses
import math
from collections.abc import Sequence

from benchmarks.sweep.links import rate_name
from benchmarks.training.cells import BASELINES
from benchmarks.training.curves import Curves, baseline, epochs_to
from benchmarks.training.seconds import Step, Worker, float32, step, traffic
from gradcomp_jax import _markdown
from gradcomp_jax.planning import Link
from gradcomp_jax.planning.predict import CLEAR

RATES = (10e9, 1e9, 100e6, 20e6)
"""Of links, bits a second."""

TOLERANCE = 0.01


@dataclasses.dataclass(frozen=True)
class Composed:
    """Methods of one task and number of workers, over some links.

    Attributes:
        dense: the best dense baseline that there are runs of.
        curves: all methods: the baseline first, then those that come to the target, the fewest steps first, then the others,
            the one that ends best first.
        rates: of the links, bits a second.
        latency: of the links, seconds.
        worker: what computes.
        seconds: of a step, by method and rate; of the baseline the better of bfloat16 and float32.
        weak: of a step of dense float32 whose exchange nothing hides, by rate: the baseline that this is not held against.
        tolerance: by how much the target may be worse than the metric that dense ends at: a loss by as much above it, an
            accuracy below it.
    """

    dense: Curves
    curves: tuple[Curves, ...]
    rates: tuple[float, ...]
    latency: float
    worker: Worker
    seconds: dict[tuple[str, float], Step]
    weak: dict[float, Step]
    tolerance: float = TOLERANCE

    @property
    def target(self) -> float:
        """Returns the metric that counts as dense's: its last one and the tolerance."""
        last = self.dense.mean[-1]
        return last * (1 - self.tolerance if self.dense.metric == "accuracy" else 1 + self.tolerance)

    def steps(self, curves: Curves) -> float:
        """Returns the steps to the target, infinity where the runs do not come that far."""
        sign = 1 if curves.metric == "accuracy" else -1
        return _steps_to(sign * self.target, curves)

    def time(self, curves: Curves, rate: float) -> float:
        """Returns the seconds to the target."""
        return self.steps(curves) * self.seconds[curves.name, rate].total

    def fastest(self) -> list[Curves]:
        """Returns the baseline, and each method that comes to what it ends at before any other one does, over some link."""

        def first(one: Curves, rate: float) -> bool:
            end = one.best()[-1]
            times = {c.name: _steps_to(end, c) * self.seconds[c.name, rate].total for c in self.curves}
            return times[one.name] <= min(times.values())

        return [one for one in self.curves if one is self.dense or any(first(one, rate) for rate in self.rates)]

    def ratio(self, curves: Curves, rate: float) -> float:
        """Returns the seconds to the target over those of the best dense baseline: below 1 the method is faster."""
        return self.time(curves, rate) / self.time(self.dense, rate)

    def more_than(self, curves: Curves, rate: float) -> float:
        """Returns the same for the whole run: a method that is not at the target by then takes more."""
        whole = curves.steps * curves.epochs * self.seconds[curves.name, rate].total
        return whole / self.time(self.dense, rate)

    @property
    def compressed(self) -> list[Curves]:
        """Returns the methods that are no dense baseline."""
        return [one for one in self.curves if one.method not in BASELINES]


def compose(
    curves: Sequence[Curves],
    worker: Worker,
    *,
    workers: int,
    rates: Sequence[float] = RATES,
    latency: float,
    tolerance: float = TOLERANCE,
    epochs: int | None = None,
) -> Composed:
    """Puts the runs of a task, those with its own optimizer and epochs, and the seconds of a step together.

    With ``epochs`` the rows are taken that were run for so many instead of the task's.

    Raises:
        ValueError: if there is no dense run of as many workers, or nothing beside it.
    """
    shared = {} if epochs is None else {"epochs": epochs}
    dense = baseline(curves, workers, shared)
    others = [one for one in curves if one.workers == workers and one.shared == shared and one is not dense]
    if dense is None or not others:
        kinds = {(one.workers, one.shared.get("epochs")) for one in curves}
        there = ", ".join(sorted(_kind(*kind) for kind in kinds)) or "none"
        raise ValueError(
            f"needs a run of {' or '.join(BASELINES)} and another one with {_kind(workers, epochs)}; there are {there}"
        )
    chosen = [dense, *others]
    links = {rate: Link.of_bits(rate, latency) for rate in rates}
    seconds: dict[tuple[str, float], Step] = {}
    for one in chosen:
        described = traffic(one)
        seconds |= {(one.name, rate): step(one, described, worker, link) for rate, link in links.items()}
    plain = float32(dense)
    described = traffic(plain)
    weak = {rate: step(plain, described, worker, link, buckets=False) for rate, link in links.items()}
    for rate, link in links.items():
        # Dense trains alike in both types: the baseline has the faster one.
        both = seconds[dense.name, rate], step(plain, described, worker, link)
        seconds[dense.name, rate] = min(both, key=lambda one: one.total)
    found = Composed(dense, (), tuple(rates), latency, worker, seconds, weak, tolerance)
    order = sorted(others, key=lambda one: (found.steps(one), -one.best()[-1]))
    return dataclasses.replace(found, curves=(dense, *order))


def _steps_to(value: float, curves: Curves) -> float:
    return curves.steps * epochs_to(value, curves.best())


def _kind(workers: int, epochs: int | None) -> str:
    return f"{workers} workers" if epochs is None else f"{workers} workers and {epochs} epochs"


def table(found: Composed) -> list[str]:
    """Returns a row for each method: its steps, and its seconds to the target over each link with the ratio."""
    heads = ["method", "fewer bytes than dense", "seeds", "steps to it", *map(rate_name, found.rates)]
    rows = []
    for one in found.curves:
        steps = found.steps(one)
        there = math.isfinite(steps)
        cells = [_cell(found, one, rate) for rate in found.rates]
        rows.append(
            (
                one.name,
                f"{_markdown.figure(found.dense.sent / one.sent)}x",
                len(one.values),
                f"{steps:,.0f}" if there else f"> {one.steps * one.epochs:,.0f}",
                *cells,
            )
        )
    return _markdown.table(heads, rows, align="lr")


def _cell(found: Composed, one: Curves, rate: float) -> str:
    ratio, time = found.ratio(one, rate), found.time(one, rate)
    if math.isinf(ratio):
        return f"not reached (> {found.more_than(one, rate):.2f}x)"
    text = f"{_markdown.figure(time)} s ({ratio:.2f}x)"
    return f"**{text}**" if one is not found.dense and ratio > 1 else text


def steps_table(found: Composed) -> list[str]:
    """Returns the modelled seconds of a step over each link, those of the weak baseline last."""
    heads = ("method", *map(rate_name, found.rates))
    rows = [(one.name, *(_milliseconds(found.seconds[one.name, rate]) for rate in found.rates)) for one in found.curves]
    rows.append(("*dense float32, nothing hidden*", *(_milliseconds(found.weak[rate]) for rate in found.rates)))
    return _markdown.table(heads, rows, align="lr")


def _milliseconds(one: Step) -> str:
    return f"{_markdown.figure(1e3 * one.total)} ms"


def wins(found: Composed, rates: Sequence[float]) -> int:
    """Returns in how many cells a method is faster to the target than the best dense baseline, by what counts as clear."""
    return sum(found.ratio(one, rate) < 1 / CLEAR for one in found.compressed for rate in rates)


def weak_wins(found: Composed, rates: Sequence[float]) -> int:
    """Returns the same for seconds of a step against dense float32 whose exchange nothing hides."""
    return sum(
        found.weak[rate].total > CLEAR * found.seconds[one.name, rate].total
        for one in found.compressed
        for rate in rates
    )


def needed(found: Composed, rate: float) -> float:
    """Returns how many times fewer bytes than float32's make the exchange a twentieth of the computation, nothing hidden."""
    return found.weak[rate].exposed / (0.05 * found.worker.compute)
