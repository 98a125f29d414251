"""One training run: many workers on one mesh, a compiled step, and what it cost."""

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradcomp_jax._errors import SettingError, known_name
from gradcomp_jax.audit import wire_bytes
from gradcomp_jax.distributed import Verifier, check_equal, digest
from gradcomp_jax.experiments import recipes
from gradcomp_jax.experiments.listeners import Listener, Past
from gradcomp_jax.experiments.problem import Problem
from gradcomp_jax.experiments.results import RunResult, Wire, step_time
from gradcomp_jax.experiments.settings import Settings
from gradcomp_jax.replicas import consolidate, mean_wire_bytes
from gradcomp_jax.training import init_state, make_train_step
from gradcomp_jax.training.donation import OwnBuffers
from gradcomp_jax.training.simulated import make_simulated_step, sent_program, simulated_state


class Trainer:
    """A method on a problem, compiled once and run for any number of seeds.

    The devices may belong to several processes of ``jax.distributed``. Every process then makes the same calls in the
    same order, places the examples of its own devices, and evaluates its own copy of the parameters.
    """

    def __init__(
        self,
        method: str,
        problem: Problem,
        settings: Settings,
        *,
        listener: Listener | None = None,
        verify_every: int = 0,
        one_device: bool = False,
    ) -> None:
        """Builds the transformation of a name of ``recipes.RECIPES``, and compiles the training step.

        With ``verify_every`` the copies of the parameters on all devices are compared every so many steps, and before the end
        of every epoch. Several processes compare program and initial parameters always.

        With ``one_device`` all workers share the first device that JAX finds: each is a lane of a ``vmap``. The bytes are those
        of the program that devices of their own would run, lowered and not compiled.
        """
        self.method = known_name("method", method, recipes.RECIPES)
        self.problem = problem
        self.settings = settings
        self.steps_per_epoch = problem.steps_per_epoch(settings)
        tx = recipes.build(self.method, settings, self.steps_per_epoch)
        self.one_device = one_device
        self.mesh = data_mesh(1 if one_device else settings.workers, settings.axis_name)
        if verify_every and recipes.RECIPES[self.method].replicas:
            raise SettingError(f"the workers of {self.method} have parameters that differ: drop --verify-every")
        if verify_every and one_device:
            raise SettingError("workers that share one device have no copies to compare: drop --verify-every")
        self._verifier = Verifier(self.mesh, verify_every)
        self._batch_sharding = NamedSharding(self.mesh, P(settings.axis_name))
        self._consolidate = jax.jit(consolidate, out_shardings=NamedSharding(self.mesh, P()))
        listener = listener or Listener()
        listener.compiling(self.method)
        batch = self._place(next(iter(problem.batches(settings, 0, 0))))
        state = self.initial_state(seed=0)
        axis: dict[str, Any] = {"axis_name": settings.axis_name}
        if one_device:
            step = make_simulated_step(problem.loss, tx, settings.workers, **axis)
        else:
            step = make_train_step(problem.loss, tx, self.mesh, **axis)
        # Called as compiled, so that the audited program and the one that trains are the same.
        lowered = step.lower(state, batch)
        if jax.process_count() > 1:
            program = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:12]
            check_equal(
                {"steps in an epoch": self.steps_per_epoch, "the program of a step": program},
                remedy="give all of them the same code and data",
            )
        self._step = lowered.compile()
        sends = sent_program(problem.loss, tx, settings.workers, state, batch, **axis) if one_device else self._step
        self.wire = self._count_bytes(sends)
        listener.compiled(self.method, self.wire)

    def initial_state(self, seed: int) -> Any:
        """Returns the training state before the first step, placed on the mesh."""
        params = self.problem.init(seed)
        if jax.process_count() > 1:
            remedy = "they must be made the same in every process: by the seed, or read from one file"
            check_equal({f"the initial {name}": value for name, value in digest(params).items()}, remedy=remedy)
        tx = recipes.build(self.method, self.settings, self.steps_per_epoch, seed=seed)
        replicas = recipes.RECIPES[self.method].replicas
        how: dict[str, Any] = {"axis_name": self.settings.axis_name, "replicas": replicas}
        if self.one_device:
            return simulated_state(params, tx, self.settings.workers, **how)
        return init_state(params, tx, self.mesh, **how)

    def run(self, seed: int, *, listener: Listener | None = None, past: Past | None = None) -> RunResult:
        """Trains from the start, or on from where an earlier run was broken off.

        The same seed (of the initial parameters, the order of the examples and random rounding) gives the same bits, whether or
        not the run was broken off in between: the order of the examples depends on the seed and the epoch alone. The state of
        ``past`` is donated.
        """
        if seed < 0:
            raise SettingError(f"seed must be at least 0, got {seed}")
        listener = listener or Listener()
        past = past or Past(self.initial_state(seed))
        # What others made may have one buffer twice; the compiled step would end the process.
        state = OwnBuffers().of(past.state)
        done = int(state.step) // self.steps_per_epoch
        if done >= self.settings.epochs:
            raise SettingError(f"this run has had {done} epochs already: ask for more than {done} to go on")
        listener.started(self.method, seed, self.settings.epochs * self.steps_per_epoch, done * self.steps_per_epoch)
        losses = list(past.loss)
        evaluations = list(past.evaluation)
        seconds = list(past.seconds)
        for epoch in range(done, self.settings.epochs):
            for values in self.problem.batches(self.settings, seed, epoch):
                batch = self._place(values)
                jax.block_until_ready(batch)
                before = time.perf_counter()
                state, metrics = self._step(state, batch)
                jax.block_until_ready((state, metrics))
                seconds.append(time.perf_counter() - before)
                losses.append(float(metrics["loss"]))
                self._verifier.after_step(len(losses), state.params)
                listener.stepped(self.method, seed, len(losses), losses[-1])
            # Before anything is saved.
            self._verifier.check()
            evaluations.append(self.evaluate(state.params, losses[-self.steps_per_epoch :]))
            past = Past(state, tuple(losses), tuple(evaluations), tuple(seconds), self.problem.metric)
            listener.finished_epoch(self.method, seed, epoch + 1, past)
        result = self.result(seed, past)
        listener.finished(result)
        return result

    def result(self, seed: int, past: Past) -> RunResult:
        """Returns what a run has given whose epochs are all past."""
        return RunResult(
            method=self.method,
            dataset=self.problem.name,
            seed=seed,
            settings=self.settings,
            loss=past.loss,
            evaluation=past.evaluation,
            wire=self.wire,
            step_time=step_time(past.seconds),
            metric=self.problem.metric,
        )

    def evaluate(self, params: Any, losses: Sequence[float] = (), *, on: Problem | None = None) -> float:
        """Returns the metric of ``params``, of replicas that differ, of their mean.

        ``losses`` are those of the last epoch, ``on`` is the problem that judges, by default the one that is trained.
        """
        judge = (on or self.problem).evaluate
        if judge is None:
            return float(np.mean(losses))
        if recipes.RECIPES[self.method].replicas:
            params = self._consolidate(params)
        # The replicas are equal: one of them, on a device of this process, is enough.
        return judge(jax.tree.map(lambda leaf: leaf.addressable_data(0), params))

    def _place(self, batch: Any) -> Any:
        """Splits the examples among the workers; each process places those of its own devices."""

        def split(values: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(values.shape, self._batch_sharding, lambda index: values[index])

        return jax.tree.map(split, batch)

    def _count_bytes(self, program: Any) -> Wire:
        """Reads the bytes of every stage of the warm-up, and of the stage after it; or of a period, averaged over its steps."""
        if recipes.RECIPES[self.method].periodic:
            # Of a period's steps each exchange takes place in one: those of its final density.
            mean = mean_wire_bytes(program, every=self.settings.every)
            return Wire(sent=round(mean), sent_mean=mean, sent_most=wire_bytes(program, branch=-1).sent)
        warm_up = recipes.RECIPES[self.method].warm_up(self.settings, self.steps_per_epoch)
        final = wire_bytes(program, branch=-1).sent
        stages = tuple((steps, wire_bytes(program, branch=branch).sent) for branch, (steps, _) in enumerate(warm_up))
        total, left = 0, self.settings.epochs * self.steps_per_epoch
        for steps, sent in stages:
            taken = min(steps, left)
            total, left = total + taken * sent, left - taken
        mean = (total + left * final) / (self.settings.epochs * self.steps_per_epoch)
        return Wire(sent=final, sent_mean=mean, sent_most=max([final, *(sent for _, sent in stages)]), stages=stages)


def data_mesh(workers: int, axis_name: str) -> Mesh:
    """Returns a mesh with one axis over the first ``workers`` devices, of all processes."""
    devices = jax.devices()
    if jax.process_count() > 1 and workers != len(devices):
        raise SettingError(
            f"{workers} workers do not use the {len(devices)} devices of {jax.process_count()} processes: leave the "
            "number of workers out, and every device is one"
        )
    if workers > len(devices):
        raise SettingError(
            f"{workers} workers need {workers} devices and {devices[0].platform} has "
            f"{len(devices)}: use fewer workers, one device for all of them (one_device=True, or --one-device), or simulated"
            f" ones (XLA_FLAGS=--xla_force_host_platform_device_count={workers} before jax starts)"
        )
    return Mesh(np.asarray(devices[:workers]), (axis_name,), axis_types=(AxisType.Auto,))
