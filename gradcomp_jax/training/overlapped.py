"""Delayed averages whose exchanges run beside the steps, in a thread, where one program cannot overlap them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gradcomp_jax import _arguments, _checks, _compat, _specs, _tracking, per_device
from gradcomp_jax._counters import NEAR_THE_END, count_on
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.core import ExchangeState
from gradcomp_jax.core.overwritten import joined, trained
from gradcomp_jax.per_device import PerDevice, is_per_device, nodes_within
from gradcomp_jax.replicas import MARKED, delayed_average
from gradcomp_jax.replicas.delayed import mean_of
from gradcomp_jax.replicas.nonfinite import dropped, restored
from gradcomp_jax.replicas.outer import is_masked
from gradcomp_jax.training import overwriting, refusals, seen
from gradcomp_jax.training.donation import OwnBuffers
from gradcomp_jax.training.gradients import worker_value_and_grad
from gradcomp_jax.training.observed import as_metric
from gradcomp_jax.training.resize import on_marks
from gradcomp_jax.training.state import TrainState, check_axis, has_replicas, lift_replicas, state_specs
from gradcomp_jax.transforms import skipped

_ARRIVED = "gradcomp_arrived"


@dataclasses.dataclass(frozen=True)
class Link:
    """Describes the link of a chain whose exchanges are late: when they depart, and where they are in its state.

    Attributes:
        place: the index of the link in the chain.
        delay: steps from the one at whose end an exchange departs to the one in which it lands, at least 1.
        every: steps from one exchange to the next one that starts from the state it leaves.
        departs: returns, for a step and the number of parts, the part whose turn is at the end of the step, or ``None``.
        pick: returns a copy of what is sent, for the link's state, the step and the part.
        methods: returns the exchange's states, by part, for the link's state.
        with_methods: returns the link's state with other states of the exchange.
    """

    place: int
    delay: int
    every: int
    departs: Callable[[int, int], int | None]
    pick: Callable[[Any, int, int], PyTree]
    methods: Callable[[Any], tuple]
    with_methods: Callable[[Any, tuple], Any]

    def check(self, chain: Any) -> None:
        """Refuses the state of a chain without this link, or with another delay or period.

        Raises:
            ValueError: if the state does not fit.
        """
        late = chain[self.place] if type(chain) is tuple and len(chain) > self.place else None
        if (getattr(late, "delay", None), getattr(late, "every", None)) != (self.delay, self.every):
            raise ValueError(
                f"the state is not of these steps, whose delay is {self.delay} and whose period is {self.every}: make it with"
                " init_state(params, step.tx, mesh, replicas=True)"
            )


class OverlappedStep:
    """Runs ``step(state, batch) -> (state, metrics)``; see :func:`make_overlapped_step` and :func:`make_overlapped_outer_step`.

    Attributes:
        tx: the transformation of the steps; the first state is ``gc.init_state(params, step.tx, mesh, replicas=True)``.
    """

    def __init__(
        self, tx: optax.GradientTransformation, programs: Sequence[Callable[..., Any]], link: Link, mesh: Mesh
    ) -> None:
        """Takes the programs: a gradient, the rest of a step without communication, and an exchange of what a link sends."""
        self.tx = tx
        self._gradient, self._local, self._cross = programs
        self._link, self._mesh = link, mesh
        # With one thread, exchanges run in the order of their departures, which is the same on all workers.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gradcomp-exchange")
        self._flying: dict[int, Future] = {}
        self._none: PyTree | None = None
        self._last: TrainState | None = None
        self._number = 0
        self._buffers = OwnBuffers()

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        """Runs one step. It waits only for the exchange that lands in it, and not before its gradient is being computed."""
        state = self._buffers.of(state, batch)
        if not has_replicas(state):
            raise ValueError("the state has one set of parameters for all workers: init_state(..., replicas=True)")
        link = self._link
        if state is not self._last:
            # The state is new or restored: what is in flight in it is sent (again).
            # Earlier exchanges may end with an error: whoever goes back to a checkpoint has seen it.
            wait(self._flying.values())
            self._flying.clear()
            link.check(state.opt_state)
            self._number = int(state.opt_state[link.place].step)
            for departure in range(self._number - link.delay, self._number):
                self._send(state, departure)
        gradient, seen = self._gradient(state.params, batch)
        departure = self._number - link.delay
        # The exchange's state is not given to the step, which takes the memory of all its arguments.
        arrived, methods = self._nothing(trained(state.params)), list(link.methods(state.opt_state[link.place]))
        if (part := link.departs(departure, len(methods))) is not None:
            means, methods[part] = self._flying[departure].result()
            arrived = jax.tree.map(lambda m, none: none if is_masked(m) else m, means, arrived, is_leaf=is_masked)
            del self._flying[departure]
        skips = [node.skipped for node in nodes_within(methods, lambda node: isinstance(node, ExchangeState))]
        state, counted = self._local(self._with_methods(state, [()] * len(methods)), gradient, arrived, skips)
        state = self._with_methods(state, methods)
        self._send(state, self._number)
        self._number += 1
        # A counter that is reset is read again.
        self._last = state if self._number <= NEAR_THE_END else None
        self._buffers.returned(state)
        return state, seen | counted

    def wait(self) -> None:
        """Waits for every exchange that has started.

        With several processes, call it before another program communicates, such as a save, and before processes end, or
        the others would wait for them.
        """
        for future in list(self._flying.values()):
            future.result()

    def _send(self, state: TrainState, departure: int) -> None:
        link = self._link
        late = state.opt_state[link.place]
        methods = link.methods(late)
        part = link.departs(departure, len(methods))
        if part is None:
            return
        sums, method = link.pick(late, departure, part), methods[part]
        earlier = self._flying.get(departure - link.every)

        def exchange() -> Any:
            before = method if earlier is None else earlier.result()[1]
            return jax.block_until_ready(self._cross(sums, before))

        self._flying[departure] = self._thread.submit(exchange)

    def _nothing(self, params: PyTree) -> PyTree:
        if self._none is None:
            everywhere = NamedSharding(self._mesh, PartitionSpec())

            def zeros(replicas: PerDevice) -> Array:
                whole = np.broadcast_to(np.float32(0), replicas.value.shape[1:])
                # This does not compare the processes' values over the network, as ``device_put`` does.
                return jax.make_array_from_callback(whole.shape, everywhere, whole.__getitem__)

            self._none = jax.tree.map(zeros, params, is_leaf=is_per_device)
        return self._none

    def _with_methods(self, state: TrainState, methods: Sequence[Any]) -> TrainState:
        links = list(state.opt_state)
        links[self._link.place] = self._link.with_methods(links[self._link.place], tuple(methods))
        return state._replace(opt_state=tuple(links))


@_arguments.checked
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
    aux: PyTree = "auto",
    check_vma: bool = True,
) -> OverlappedStep:
    """Makes steps of ``optax.chain(gc.delayed_average(method, ...), optimizer)`` with the exchange in a thread beside them.

    A compiler with asynchronous collectives overlaps the exchange inside :func:`make_train_step`'s one program. On CPU a
    program does one thing after the other; here the exchange is a separate program, and a thread runs it while the next steps
    compute. A step computes its gradient while it waits for the mean that lands in it: with a delay of 1 an exchange has the
    time of one gradient. Results and state are those of the one program: the state can be saved, restored and resized, and
    either can continue from it. What is in flight is in the state, so nothing is lost with the thread. Exchanges run one after
    the other, so a step waits if they take longer than ``every`` steps.

    XLA:CPU has as many threads for programs as a process may use cores. On one core, an exchange that waits for the network
    holds the only thread, and nothing overlaps: set the environment variable ``PJRT_NPROC=4`` before JAX starts.

    Example:
        >>> method = gc.topk_sgd(axis_name="data", density=0.01)
        >>> step = gc.make_overlapped_step(loss, method, optax.sgd(0.1), mesh, delay=1)
        >>> type(step).__name__  # call step(state, batch), and step.wait() at the end
        'OverlappedStep'

    Args:
        loss: as for :func:`make_train_step`.
        method: an exchange that needs no parameters.
        optimizer: the optimizer after it, on every replica.
        mesh: the mesh of ``init_state``.
        axis_name: the axis of the workers.
        delay: as for :func:`gradcomp_jax.delayed_average`, at least 1.
        every: as for :func:`gradcomp_jax.delayed_average`.
        compensate: as for :func:`gradcomp_jax.delayed_average`.
        has_aux: as for :func:`make_train_step`.
        aux: as for :func:`make_train_step`.
        check_vma: as for :func:`make_train_step`.

    Returns:
        ``step``. ``step(state, batch)`` returns a new state and ``metrics``, each worker's own, ``[N]``; the state is donated.
        Call ``step.wait()`` at the end, and, with several processes, before a save.

    Raises:
        ValueError: without a delay; if the mesh has no such axis; for a state without replicas.
    """
    check_delay(delay)
    options: dict[str, Any] = {"axis_name": axis_name, "delay": delay, "every": every, "compensate": compensate}
    tx = optax.chain(delayed_average(method, **options), optimizer)
    quiet = optax.chain(delayed_average(arriving(method), **options), optimizer)

    def pick(flying: PyTree, period: Any) -> PyTree:
        specs = (state_specs(flying, axis_name=axis_name), PartitionSpec())
        return _specs.mapped(_slot, mesh, axis_name, specs, PartitionSpec(axis_name))(flying, period)

    def departs(step: int, parts: int) -> int | None:
        # With ``every=1`` one program exchanges from its first step on; the first exchanges are of zeros.
        return 0 if (step + 1) % every == 0 and (step >= 0 or every == 1) else None

    picked = jax.jit(pick)
    link = Link(
        place=0,
        delay=delay,
        every=every,
        departs=departs,
        pick=lambda late, step, _: picked(late.flying, np.int32(step // every)),
        methods=lambda late: (late.method,),
        with_methods=lambda late, methods: dataclasses.replace(late, method=methods[0]),
    )
    exchange = optax.with_extra_args_support(method)
    of_means = optax.GradientTransformation(
        method.init, lambda s, state, _=None: exchange.update(mean_of(s, every), state)
    )
    given: dict[str, Any] = {"axis_name": axis_name, "has_aux": has_aux, "aux": aux, "check_vma": check_vma}
    return beside(loss, (tx, quiet, of_means), mesh, link, **given)


def beside(
    loss: Callable[..., Any],
    chains: tuple[optax.GradientTransformation, optax.GradientTransformation, optax.GradientTransformation],
    mesh: Mesh,
    link: Link,
    *,
    axis_name: AxisName,
    has_aux: bool,
    aux: PyTree,
    check_vma: bool,
) -> OverlappedStep:
    """Returns steps of a chain with a late link; other arguments are those of :func:`make_train_step`.

    ``chains`` are the chain, the same with :func:`arriving` instead of its exchange, and the exchange of what the link sends.
    """
    check_axis(mesh, axis_name)
    tx, quiet, exchange = chains
    value_and_grad = worker_value_and_grad(
        loss, axis_name=axis_name, has_aux=has_aux, aux=aux, accumulate=1, weight=None
    )
    by_worker, everywhere = PartitionSpec(axis_name), PartitionSpec()
    mapped = functools.partial(_specs.mapped, mesh=mesh, axis_name=axis_name, check_vma=check_vma)
    with_arrived = optax.with_extra_args_support(quiet).update

    def own(observed: PyTree) -> PyTree:
        return jax.tree.map(lambda x: _compat.varying(as_metric(x), axis_name)[None], observed)

    def local_gradient(params: PyTree, batch: PyTree) -> tuple[PyTree, dict[str, Any]]:
        mine = per_device.lower(params)
        found = value_and_grad(mine, batch)
        metrics = own({"loss": found.value})
        if has_aux:
            numbers, examples = seen.parted(found.kinds(), found.aux)
            metrics["aux"] = seen.together(own(numbers), _compat.varying(examples, axis_name))
        return per_device.lift(overwriting.heard(found.gradient, mine, None)), metrics

    def gradient(params: PyTree, batch: PyTree) -> Any:
        refusals.refuse_unplaced(batch, mesh, axis_name)
        specs = state_specs(params, axis_name=axis_name)
        return mapped(local_gradient, in_specs=(specs, by_worker), out_specs=by_worker)(params, batch)

    def local(
        state: TrainState, gradient: PyTree, arrived: PyTree, skips: list[Array]
    ) -> tuple[TrainState, dict[str, Any]]:
        state, gradient = per_device.lower((state, gradient))
        before = trained(state.params)
        with _tracking.explained(axis_name):
            updates, opt_state = with_arrived(trained(gradient), state.opt_state, before, **{_ARRIVED: arrived})
        opt_state = restored(opt_state, state.opt_state, (ExchangeState, *MARKED))
        params = joined(state.params, optax.apply_updates(before, updates), gradient)
        counted = {"skipped": sum(skips, skipped(opt_state)), "dropped": dropped(opt_state)}
        counted = own({name: jnp.asarray(count, jnp.float32) for name, count in counted.items()})
        new = TrainState(count_on(state.step), params, opt_state)
        return lift_replicas(overwriting.kept_if_skipped(new, state, dropped)), counted

    def step(state: TrainState, gradient: PyTree, arrived: PyTree, skips: list[Array]) -> Any:
        specs = state_specs(state, axis_name=axis_name)
        in_specs = (specs, by_worker, everywhere, everywhere)
        return mapped(local, in_specs=in_specs, out_specs=(specs, by_worker))(state, gradient, arrived, skips)

    def cross(sent: PyTree, inner: Any) -> Any:
        specs = state_specs((sent, inner), axis_name=axis_name)
        update = mapped(
            lambda s, i: exchange.update(per_device.lower(s), i), in_specs=specs, out_specs=(everywhere, specs[1])
        )
        return update(sent, inner)

    return OverlappedStep(tx, (jax.jit(gradient), jax.jit(step, donate_argnums=0), jax.jit(cross)), link, mesh)


def arriving(method: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Makes a transformation that replaces the method and returns the mean that the thread has brought."""

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        return jax.tree.map(lambda u, a: u if is_masked(u) else a, updates, extra[_ARRIVED], is_leaf=is_masked), state

    return optax.GradientTransformationExtraArgs(method.init, update)


def check_delay(delay: int) -> None:
    """Refuses a delay of 0, with which there is nothing to overlap."""
    if _checks.non_negative_int("delay", delay) == 0:
        raise ValueError("delay=0 leaves nothing to overlap: use make_train_step")


def _slot(flying: PyTree, period: Any) -> PyTree:
    """Returns one worker's sums of a period, from the ring."""
    return on_marks(
        flying, lambda mark: PerDevice(lax.dynamic_slice_in_dim(mark.value, period % mark.rows, 1), 1, lifted=True)
    )
