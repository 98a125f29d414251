"""What a step of a run would take between real machines: its computation, its arithmetic, and its bytes over a link."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import optax

from benchmarks.tasks import datasets
from benchmarks.tasks.tasks import task
from benchmarks.training.cells import BASELINES
from benchmarks.training.curves import Curves
from gradcomp_jax.experiments import recipes
from gradcomp_jax.experiments.problem import Problem
from gradcomp_jax.experiments.registered import optimizer
from gradcomp_jax.experiments.replicas import muon
from gradcomp_jax.experiments.settings import Settings, split_batch
from gradcomp_jax.methods.registry import METHODS, command_name
from gradcomp_jax.methods.traffic import Traffic, traffic_of
from gradcomp_jax.planning import Device, Link, costs, profile_compression, profile_step

OVERLAP = 2 / 3
"""Share of the computation beside which dense buckets leave: the backward pass, as :class:`gradcomp_jax.Workload` has it."""

BUCKETS = (2, 4, 8)
LATE = ("delayed-average", "delayed-int8", "delayed-dgc", "stale-synchronous", "streaming-diloco")
"""Recipes whose exchanges arrive some steps later, beside all computation."""

OPTIMIZERS = {"muloco": muon}
"""Of recipes whose steps are not those of the task's optimizer."""

_WITHIN = {
    "streaming-diloco": "block_quantized",
    "muloco": "block_quantized",
    "sparse-loco": "topk_sgd",
    "delayed-int8": "block_quantized",
    "delayed-dgc": "dgc",
    "sparse-adamw": "topk_two_bits",
}
"""Methods within recipes that do not begin with the name of one."""


@dataclasses.dataclass(frozen=True)
class Worker:
    """A device that trains.

    Attributes:
        compute: seconds of the gradient of its part of the batch, and of the optimizer.
        copy_rate: bytes a second that a copy reads and writes there, together.
        own: the seconds in place of ``compute`` of recipes that have an optimizer of their own, where they are known.
    """

    compute: float
    copy_rate: float
    own: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def computing(self, recipe: str) -> float:
        """Returns the seconds of a recipe's gradient and optimizer."""
        return self.own.get(recipe, self.compute)


@dataclasses.dataclass(frozen=True)
class Step:
    """Seconds of a step, on average over a run.

    Attributes:
        compute: of the worker.
        compress: arithmetic of the method.
        exposed: communication that computation does not hide.
    """

    compute: float
    compress: float
    exposed: float

    @property
    def total(self) -> float:
        """Returns all of it."""
        return self.compute + self.compress + self.exposed


@functools.cache
def problem(name: str) -> Problem:
    """Returns a task with its data."""
    found = task(name)
    return found.on(datasets.load(found.dataset))


@functools.cache
def shapes(name: str) -> Any:
    """Returns the shapes of a task's parameters."""
    return jax.eval_shape(problem(name).init, 0)


def traffic(curves: Curves) -> Traffic:
    """Returns what a method's exchange says that it sends, of its densest kind of step after a warm-up."""
    known = {field.name for field in dataclasses.fields(Settings)}
    settings = Settings(**{name: value for name, value in curves.settings.items() if name in known})
    tx = recipes.build(curves.method, settings, max(1, round(curves.steps)))
    return traffic_of(tx, shapes(curves.task), {settings.axis_name: curves.workers})


def step(curves: Curves, described: Traffic, worker: Worker, link: Link, *, buckets: bool = True) -> Step:
    """Models a step: bytes as the run's program sent them, by the collectives that the method's exchange describes.

    An exchange once in some steps, and one that is larger during a warm-up, count by the bytes of the run's mean step. A dense
    baseline has the best of these: one exchange after the backward pass, or a few buckets beside it. Methods that are late have
    all computation to hide behind. Nothing of the others is hidden, which favours the baseline.

    Args:
        curves: of the run.
        described: :func:`traffic` of it.
        worker: what computes.
        link: of each worker.
        buckets: whether a baseline may have them.
    """
    bytes_over = curves.sent / described.sent
    often, larger = min(1.0, bytes_over), max(1.0, bytes_over)

    def seconds(parts: int) -> float:
        launches = [(c, c.launches * parts) for c in described.collectives]
        return often * sum(n * costs.collective(c.kind, curves.workers, larger * c.sent / n, link) for c, n in launches)

    compute = worker.computing(curves.method)
    hidden = compute if curves.method in LATE else 0.0
    exposed = max(0.0, seconds(1) - hidden)
    if buckets and curves.method in BASELINES:
        beside = (max(0.0, seconds(parts) - OVERLAP * compute) for parts in BUCKETS)
        exposed = min(exposed, *beside)
    values = sum(leaf.size for leaf in jax.tree.leaves(shapes(curves.task)))
    arithmetic = Device(worker.copy_rate, platform="cpu").compression(within(curves.method), values)
    return Step(compute, often * arithmetic, exposed)


def float32(curves: Curves) -> Curves:
    """Returns a dense run as one of float32 that sends what its exchange describes."""
    plain = dataclasses.replace(curves, method="dense")
    return dataclasses.replace(plain, sent=traffic(plain).sent)


def within(recipe: str) -> str:
    """Returns the registered method whose arithmetic a recipe has; dense where it sends what there is."""
    if recipe in _WITHIN:
        return _WITHIN[recipe]
    names = {command_name(name): name for name in METHODS} | {"int8": "block_quantized", "topk": "topk_sgd"}
    fitting = [name for name in names if recipe == name or recipe.startswith(f"{name}-")]
    return names[max(fitting, key=len)] if fitting else "dense"


def measure(name: str, workers: int) -> Worker:
    """Times one worker's step on this machine, without an exchange, with each optimizer that a recipe has, and a copy."""
    one = problem(name)
    part = split_batch(one.settings.batch, workers)
    settings = dataclasses.replace(one.settings, workers=1, batch_per_worker=part)
    batch = jax.tree.map(jax.numpy.asarray, next(iter(one.batches(settings, 0, 0))))
    params = one.init(0)

    def compute(after: optax.GradientTransformation) -> float:
        def train(params: Any, state: Any, batch: Any) -> Any:
            loss, gradient = jax.value_and_grad(one.loss)(params, batch)
            updates, state = after.update(gradient, state, params)
            return loss, jax.tree.map(jax.numpy.add, params, updates), state

        return profile_step(train, (params, after.init(params), batch), params=params, repeats=9).compute

    own = {recipe: compute(make(settings)) for recipe, make in OPTIMIZERS.items()}
    return Worker(compute(optimizer(settings)), profile_compression([]).copy_rate, own)
