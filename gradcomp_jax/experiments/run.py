"""One training run: many workers on one mesh, a compiled step, and what it cost."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradcomp_jax._errors import SettingError, known_name
from gradcomp_jax.audit import wire_bytes
from gradcomp_jax.experiments import models, recipes
from gradcomp_jax.experiments.datasets import Dataset, load
from gradcomp_jax.experiments.settings import Settings
from gradcomp_jax.experiments.tasks import Task, task
from gradcomp_jax.replicas import consolidate, mean_wire_bytes
from gradcomp_jax.training import init_state, make_train_step

# The first steps of a process still touch fresh memory: they are not timed.
_UNTIMED_STEPS = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Wire:
    """Bytes that one device sends, read from the compiled step.

    Attributes:
      sent: bytes per step at the final density.
      sent_mean: bytes per step, averaged over the run with its warm-up.
      sent_most: bytes of the largest step, the first one where there is a warm-up.
    """

    sent: int
    sent_mean: float
    sent_most: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds from the start of a step until its results are ready."""

    median: float
    lower_quartile: float
    upper_quartile: float
    steps: int


@dataclasses.dataclass(frozen=True, slots=True)
class RunResult:
    """What one run gave.

    Attributes:
      method: a name of ``recipes.RECIPES``.
      dataset: a name of ``datasets.SOURCES``.
      seed: of the initial parameters, the order of the examples and random rounding.
      settings: the hyper-parameters.
      loss: mean training loss of every step, in nats.
      accuracy: fraction of the test set that is right after every epoch, in ``[0, 1]``.
      wire: bytes sent.
      step_time: seconds per step.
    """

    method: str
    dataset: str
    seed: int
    settings: Settings
    loss: tuple[float, ...]
    accuracy: tuple[float, ...]
    wire: Wire
    step_time: StepTime

    @property
    def final_accuracy(self) -> float:
        """Returns the test accuracy after the last epoch."""
        return self.accuracy[-1]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Past:
    """All that a run needs to go on after an epoch.

    Attributes:
      state: the training state, placed on the mesh.
      loss: mean training loss of every step so far, in nats.
      accuracy: test accuracy after every epoch so far.
    """

    state: Any
    loss: tuple[float, ...] = ()
    accuracy: tuple[float, ...] = ()


class Listener:
    """Hears how runs go on; every method here does nothing."""

    def compiling(self, method: str) -> None:
        """Tells that a step is about to be compiled."""

    def started(self, method: str, seed: int, steps: int) -> None:
        """Tells that a run of ``steps`` steps starts."""

    def stepped(self, method: str, seed: int, step: int, loss: float) -> None:
        """Tells that step ``step`` (from 1) of a run is done."""

    def finished_epoch(self, method: str, seed: int, epoch: int, past: Past) -> None:
        """Tells that epoch ``epoch`` (from 1) is done; ``past.state`` is valid until this returns."""

    def finished(self, result: RunResult) -> None:
        """Tells that a run is done."""


class Trainer:
    """A method on a task, compiled once and run for any number of seeds.

    The devices may belong to several processes of ``jax.distributed``. Every process then makes the same calls in the
    same order, places the examples of its own devices, and evaluates its own copy of the parameters.
    """

    def __init__(
        self, method: str, the_task: Task, dataset: Dataset, settings: Settings, *, listener: Listener | None = None
    ) -> None:
        """Builds the transformation of a name of ``recipes.RECIPES``, and compiles the training step.

        Raises:
          UnknownNameError: if there is no such method.
          SettingError: if the settings fit neither the method, the data nor the devices.
        """
        self.method = known_name("method", method, recipes.RECIPES)
        self.dataset = dataset
        self.settings = settings
        self.model = the_task.model
        self.steps_per_epoch = settings.steps_per_epoch(len(dataset.train_x))
        tx = recipes.build(self.method, settings, self.steps_per_epoch)
        self.mesh = data_mesh(settings.workers, settings.axis_name)
        self._batch_sharding = NamedSharding(self.mesh, P(settings.axis_name))
        self._evaluate = jax.jit(self._correct)
        self._consolidate = jax.jit(consolidate, out_shardings=NamedSharding(self.mesh, P()))
        if listener is not None:
            listener.compiling(method)
        step = make_train_step(self._loss, tx, self.mesh, axis_name=settings.axis_name)
        batch = self._place(np.arange(settings.batch))
        # Called as compiled, so that the audited program and the one that trains are the same.
        self._step = step.lower(self.initial_state(seed=0), batch).compile()
        self.wire = self._count_bytes()

    def initial_state(self, seed: int) -> Any:
        """Returns the training state before the first step, placed on the mesh."""
        params = self.model.init(jax.random.key(seed))
        tx = recipes.build(self.method, self.settings, self.steps_per_epoch, seed=seed)
        replicas = recipes.RECIPES[self.method].replicas
        return init_state(params, tx, self.mesh, axis_name=self.settings.axis_name, replicas=replicas)

    def run(self, seed: int, *, listener: Listener | None = None, past: Past | None = None) -> RunResult:
        """Trains from the start, or on from where an earlier run was broken off.

        The same seed (of the initial parameters, the order of the examples and random rounding) gives the same bits, whether or
        not the run was broken off in between: the order of the examples depends on the seed and the epoch alone. The state of
        ``past`` is donated.

        Raises:
          SettingError: if all the epochs are past already, or the seed is negative.
        """
        if seed < 0:
            raise SettingError(f"seed must be at least 0, got {seed}")
        listener = listener or Listener()
        past = past or Past(self.initial_state(seed))
        state = past.state
        done = int(state.step) // self.steps_per_epoch
        if done >= self.settings.epochs:
            raise SettingError(f"this run has had {done} epochs already: ask for more than {done} to go on")
        listener.started(self.method, seed, (self.settings.epochs - done) * self.steps_per_epoch)
        losses = list(past.loss)
        accuracies = list(past.accuracy)
        seconds: list[float] = []
        for epoch in range(done, self.settings.epochs):
            order = np.random.default_rng([seed, epoch]).permutation(len(self.dataset.train_x))
            for index in range(self.steps_per_epoch):
                start = index * self.settings.batch
                batch = self._place(order[start : start + self.settings.batch])
                jax.block_until_ready(batch)
                before = time.perf_counter()
                state, metrics = self._step(state, batch)
                jax.block_until_ready((state, metrics))
                seconds.append(time.perf_counter() - before)
                losses.append(float(metrics["loss"]))
                listener.stepped(self.method, seed, len(losses), losses[-1])
            accuracies.append(self.test_accuracy(state.params))
            past = Past(state, tuple(losses), tuple(accuracies))
            listener.finished_epoch(self.method, seed, epoch + 1, past)
        result = RunResult(
            method=self.method,
            dataset=self.dataset.name,
            seed=seed,
            settings=self.settings,
            loss=tuple(losses),
            accuracy=tuple(accuracies),
            wire=self.wire,
            step_time=_step_time(seconds),
        )
        listener.finished(result)
        return result

    def test_accuracy(self, params: models.Params) -> float:
        """Returns the fraction of the test set that ``params`` get right; of replicas that differ, their mean."""
        if recipes.RECIPES[self.method].replicas:
            params = self._consolidate(params)
        # The replicas are equal: one of them, on a device of this process, is enough.
        local = jax.tree.map(lambda leaf: leaf.addressable_data(0), params)
        correct = self._evaluate(local, self.dataset.test_x, self.dataset.test_y)
        return int(correct) / len(self.dataset.test_y)

    def _loss(self, params: models.Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        images, labels = batch
        return models.cross_entropy(self.model.apply(params, images), labels)

    def _correct(self, params: models.Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        predicted = jnp.argmax(self.model.apply(params, images), axis=-1)
        return jnp.sum(predicted.astype(labels.dtype) == labels)

    def _place(self, examples: np.ndarray) -> tuple[jax.Array, jax.Array]:
        def split(values: np.ndarray) -> jax.Array:
            # Asked for each device of this process: it gathers their examples and no others'.
            def part(index: Any) -> np.ndarray:
                return values[examples[index[0]]]

            return jax.make_array_from_callback((len(examples), *values.shape[1:]), self._batch_sharding, part)

        return split(self.dataset.train_x), split(self.dataset.train_y)

    def _count_bytes(self) -> Wire:
        """Reads the bytes of every stage of the warm-up, and of the stage after it; or of a period, averaged over its steps."""
        if recipes.RECIPES[self.method].periodic:
            # Of a period's steps each exchange takes place in one: those of its final density.
            mean = mean_wire_bytes(self._step, every=self.settings.every)
            return Wire(sent=round(mean), sent_mean=mean, sent_most=wire_bytes(self._step, branch=-1).sent)
        warm_up = recipes.RECIPES[self.method].warm_up(self.settings, self.steps_per_epoch)
        final = wire_bytes(self._step, branch=-1).sent
        left = self.settings.epochs * self.steps_per_epoch
        total = 0
        stages = []
        for branch, (steps, _) in enumerate(warm_up):
            stages.append(wire_bytes(self._step, branch=branch).sent)
            taken = min(steps, left)
            total += taken * stages[-1]
            left -= taken
        total += left * final
        return Wire(
            sent=final, sent_mean=total / (self.settings.epochs * self.steps_per_epoch), sent_most=max([final, *stages])
        )


def train(
    method: str,
    dataset: str,
    *,
    seed: int = 0,
    data_dir: str | None = None,
    listener: Listener | None = None,
    **overrides: Any,
) -> RunResult:
    """Trains one method on one data set with the hyper-parameters of its task.

    Takes names of ``recipes.RECIPES`` and ``datasets.SOURCES``, the folder of the data set's files, if it is not where its
    package puts them, and fields of ``Settings`` in the place of the task's.

    Raises:
      ExperimentError: if a name is unknown, the data are missing or the settings do not fit.
    """
    the_task = task(dataset)
    settings = dataclasses.replace(the_task.settings, **overrides)
    data = load(dataset, data_dir=data_dir)
    trainer = Trainer(method, the_task, data, settings, listener=listener)
    return trainer.run(seed, listener=listener)


def data_mesh(workers: int, axis_name: str) -> Mesh:
    """Returns a mesh with one axis over the first ``workers`` devices, of all processes.

    Raises:
      SettingError: if there are fewer devices, or if a process would have none of them.
    """
    devices = jax.devices()
    if jax.process_count() > 1 and workers != len(devices):
        raise SettingError(
            f"{workers} workers do not use the {len(devices)} devices of {jax.process_count()} processes: leave the "
            "number of workers out, and every device is one"
        )
    if workers > len(devices):
        raise SettingError(
            f"{workers} workers need {workers} devices and {devices[0].platform} has "
            f"{len(devices)}: use fewer workers, or simulated ones (XLA_FLAGS="
            f"--xla_force_host_platform_device_count={workers} before jax starts)"
        )
    return Mesh(np.asarray(devices[:workers]), (axis_name,), axis_types=(AxisType.Auto,))


def _step_time(seconds: Sequence[float]) -> StepTime:
    timed = seconds[_UNTIMED_STEPS:] or seconds
    lower, median, upper = np.percentile(timed, [25, 50, 75]).tolist()
    return StepTime(median, lower, upper, len(timed))
