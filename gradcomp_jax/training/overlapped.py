"""Delayed averages whose exchange runs beside the steps, in a thread, where one program cannot do both at once."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gradcomp_jax import _checks, _compat, _specs, per_device
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.per_device import PerDevice, is_per_device
from gradcomp_jax.replicas import DelayedState, delayed_average
from gradcomp_jax.replicas.delayed import mean_of
from gradcomp_jax.replicas.nonfinite import dropped
from gradcomp_jax.training.gradients import local_value_and_grad
from gradcomp_jax.training.refusals import refuse_donated
from gradcomp_jax.training.state import TrainState, check_axis, has_replicas, lift_replicas, state_specs
from gradcomp_jax.transforms import skipped
from gradcomp_jax.transforms.counters import NEAR_THE_END, count_on

_ARRIVED = "gradcomp_arrived"


class OverlappedStep:
    """``step(state, batch) -> (state, metrics)``; see :func:`make_overlapped_step`.

    Attributes:
        tx: the transformation whose steps these are; ``gc.init_state(params, step.tx, mesh, replicas=True)`` begins.
    """

    def __init__(
        self, tx: optax.GradientTransformation, programs: Sequence[Callable[..., Any]], delay: int, every: int
    ) -> None:
        """Takes the programs: a step without communication, a sum out of the ring, its exchange, and no mean at all."""
        self.tx = tx
        self._local, self._pick, self._cross, self._zeros = programs
        self._delay, self._every = delay, every
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gradcomp-exchange")
        self._flying: dict[int, Future] = {}
        self._none: PyTree | None = None
        self._last: TrainState | None = None
        self._number = 0

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        """One step; waits only for the exchange that lands in it."""
        refuse_donated(state)
        if not has_replicas(state):
            raise ValueError("the state has one set of parameters for all workers: init_state(..., replicas=True)")
        if state is not self._last:
            # Begun, or restored: what is on its way in this state is sent (again).
            # What went before is let end, well or not: whoever goes back to a checkpoint has been told why.
            wait(self._flying.values())
            self._flying.clear()
            self._number = int(state.opt_state[0].step)
            for period in range(self._landed(self._number), self._number // self._every):
                self._send(state, period)
        n = self._number
        lands = self._landed(n + 1) - 1 if self._landed(n + 1) > self._landed(n) else None
        # The exchange's own state stays out of the step, which takes over the memory of all that it is given.
        arrived, inner = self._nothing(state.params), state.opt_state[0].method
        if lands is not None:
            arrived, inner = self._flying.pop(lands).result()
        state, metrics = self._local(_with_method(state, ()), batch, arrived)
        state = _with_method(state, inner)
        self._number = n + 1
        if self._number % self._every == 0:
            self._send(state, n // self._every)
        # A counter that has gone back is read again.
        self._last = state if self._number <= NEAR_THE_END else None
        return state, metrics

    def wait(self) -> None:
        """Waits for every exchange that has begun: before processes leave, or their peers would wait for them."""
        for future in list(self._flying.values()):
            future.result()

    def _landed(self, step: int) -> int:
        """How many periods' means have arrived before a step; below zero, as one program has it, of nothing but zeros."""
        landed = (step - self._delay) // self._every
        return landed if self._every == 1 else max(0, landed)

    def _send(self, state: TrainState, period: int) -> None:
        delayed: DelayedState = state.opt_state[0]
        sums = self._pick(delayed.flying, np.int32(period))
        earlier = self._flying.get(period - 1)

        def exchange() -> Any:
            inner = delayed.method if earlier is None else earlier.result()[1]
            return jax.block_until_ready(self._cross(sums, inner))

        self._flying[period] = self._thread.submit(exchange)

    def _nothing(self, params: PyTree) -> PyTree:
        if self._none is None:
            self._none = self._zeros(params)
        return self._none


def make_overlapped_step(
    loss: Callable[..., Any],
    method: optax.GradientTransformation,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: AxisName = "data",
    delay: int,
    every: int = 1,
    compensate: bool = True,
    has_aux: bool = False,
) -> OverlappedStep:
    """Steps of ``optax.chain(gc.delayed_average(method, ...), optimizer)`` with the exchange in a thread beside them.

    A compiler with asynchronous collectives overlaps the exchange within :func:`make_train_step`'s one program. On CPU a
    program does one thing after the other; here the exchange is a program of its own, and a thread runs it while the
    next steps compute. What comes out is what the one program computes, and so is the state: it can be saved, restored and
    resized, and go on with either. What is in flight is in the state, so nothing is lost with the thread. Exchanges
    run one after the other, so a step waits once they take longer than ``every`` steps.

    XLA:CPU has as many threads for programs as a process may use cores. On one core an exchange that waits for the network
    holds the only one, and nothing overlaps: set the environment variable ``PJRT_NPROC=4`` before JAX starts.

    Args:
        loss: as for :func:`make_train_step`.
        method: an exchange that needs no parameters.
        optimizer: what follows, on every replica.
        mesh: the mesh of ``init_state``.
        axis_name: the axis of the workers.
        delay: as for :func:`gradcomp_jax.delayed_average`, at least 1.
        every: likewise.
        compensate: likewise.
        has_aux: as for :func:`make_train_step`.

    Returns:
        ``step``. ``step(state, batch)`` returns a new state and ``metrics``, each worker's own, ``[N]``; the state is donated.
        Call ``step.wait()`` at the end.

    Raises:
        ValueError: without a delay; if the mesh has no such axis; for a state without replicas.
    """
    check_axis(mesh, axis_name)
    if _checks.non_negative_int("delay", delay) == 0:
        raise ValueError("delay=0 leaves nothing to overlap: use make_train_step")
    options: dict[str, Any] = {"axis_name": axis_name, "delay": delay, "every": every, "compensate": compensate}
    tx = optax.chain(delayed_average(method, **options), optimizer)
    quiet = optax.chain(delayed_average(_arriving(method), **options), optimizer)
    exchange = optax.with_extra_args_support(method)
    value_and_grad = local_value_and_grad(loss, axis_name=axis_name, has_aux=has_aux)
    by_worker, everywhere = PartitionSpec(axis_name), PartitionSpec()
    mapping: dict[str, Any] = {"mesh": mesh, "axis_names": set(_specs.names_of(axis_name))}

    def local(state: TrainState, batch: PyTree, arrived: PyTree) -> tuple[TrainState, dict[str, Any]]:
        state = per_device.lower(state)
        value, gradient = value_and_grad(state.params, batch)
        updates, opt_state = quiet.update(gradient, state.opt_state, state.params, **{_ARRIVED: arrived})
        params = optax.apply_updates(state.params, updates)
        observed = {"loss": value[0], "aux": value[1]} if has_aux else {"loss": value}
        observed |= {"skipped": skipped(opt_state), "dropped": dropped(opt_state)}
        metrics = jax.tree.map(lambda x: _compat.varying(jnp.asarray(x, jnp.float32), axis_name)[None], observed)
        return lift_replicas(TrainState(count_on(state.step), params, opt_state)), metrics

    def step(state: TrainState, batch: PyTree, arrived: PyTree) -> Any:
        specs = state_specs(state, axis_name=axis_name)
        mapped = jax.shard_map(local, in_specs=(specs, by_worker, everywhere), out_specs=(specs, by_worker), **mapping)
        return mapped(state, batch, arrived)

    def pick(flying: PyTree, period: Any) -> PyTree:
        specs = state_specs(flying, axis_name=axis_name)
        return jax.shard_map(_slot, in_specs=(specs, everywhere), out_specs=by_worker, **mapping)(flying, period)

    def nothing(params: PyTree) -> PyTree:
        return jax.tree.map(lambda m: jnp.zeros(m.value.shape[1:], jnp.float32), params, is_leaf=is_per_device)

    def cross(sums: PyTree, inner: Any) -> Any:
        specs = state_specs((sums, inner), axis_name=axis_name)
        mapped = jax.shard_map(
            lambda s, i: exchange.update(mean_of(per_device.lower(s), every), i),
            in_specs=specs,
            out_specs=(everywhere, specs[1]),
            **mapping,
        )
        return mapped(sums, inner)

    zeros = jax.jit(nothing, out_shardings=NamedSharding(mesh, everywhere))
    return OverlappedStep(tx, (jax.jit(step, donate_argnums=0), jax.jit(pick), jax.jit(cross), zeros), delay, every)


def _slot(flying: PyTree, period: Any) -> PyTree:
    """A period's sums out of the ring, one worker's."""

    def one(mark: PerDevice) -> PerDevice:
        return PerDevice(lax.dynamic_slice_in_dim(mark.value, period % mark.rows, 1), 1, lifted=True)

    return jax.tree.map(one, flying, is_leaf=is_per_device)


def _arriving(method: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns what the thread has brought, in the method's place."""

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        return extra[_ARRIVED], state

    return optax.GradientTransformationExtraArgs(method.init, update)


def _with_method(state: TrainState, inner: Any) -> TrainState:
    delayed, *rest = state.opt_state
    return state._replace(opt_state=(dataclasses.replace(delayed, method=inner), *rest))
