"""Averages that arrive some steps later, and what a replica does until then."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from gradcomp_jax import _arguments, _checks, _compat, _registered
from gradcomp_jax._counters import count_on
from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.compressors.base import largest_of
from gradcomp_jax.core.changed import of_state
from gradcomp_jax.per_device import PerDevice, is_per_device
from gradcomp_jax.replicas import nonfinite
from gradcomp_jax.replicas.branching import each_nth, when


@_registered.node
@dataclasses.dataclass(frozen=True)
class DelayedState:
    """Holds the state of :func:`delayed_average`.

    Attributes:
        step: int32 scalar, updates seen.
        dropped: ``PerDevice`` int32 ``[1]``, how many of this worker's gradients were not finite and are in no sum.
        flying: for each tensor the sums that have not arrived, ``PerDevice`` float32 ``[slots, *shape]``; the slot is the
            period's number modulo ``slots``. ``()`` without a delay.
        method: state of the exchange.
        delay: steps, as configured.
        every: steps, as configured.
    """

    step: Array
    dropped: PerDevice
    flying: Any
    method: Any
    delay: int = dataclasses.field(metadata={"static": True})
    every: int = dataclasses.field(metadata={"static": True})

    def staleness(self) -> Array:
        """Returns how many steps' means have not arrived yet: int32 scalar."""
        landed = jnp.maximum(0, (self.step - self.delay) // self.every)
        return self.step - self.every * landed


@_arguments.checked
def delayed_average(
    method: optax.GradientTransformation,
    *,
    axis_name: AxisName | None,
    delay: int,
    every: int = 1,
    compensate: bool = True,
) -> optax.GradientTransformationExtraArgs:
    r"""Lets every replica continue with its own gradient; the workers' mean arrives some steps later.

    With ``delay`` :math:`t`, in step :math:`n` on worker :math:`j` the update is

    .. math:: g_{n,j} + \bar g_{n-t} - g_{n-t,j},

    so that with plain SGD :math:`w_{n,j} = w_0 - \eta \sum_{i<n-t} \bar g_i - \eta \sum_{i=n-t}^{n-1} g_{i,j}`: replicas
    differ only by their last :math:`t` gradients. With ``every`` :math:`p` the gradients of :math:`p` steps are added up and
    exchanged together, :math:`t` steps after the last of them. Without compensation the update is
    :math:`\bar g_{n-t}` alone, which is stale-synchronous SGD with a fixed staleness, and replicas do not differ.

    The exchange of step :math:`n` needs nothing of that step's forward and backward pass (``delay`` 1 or more), so the two
    can overlap. With ``every=1`` it is in every step; otherwise it is in a branch, and most steps send nothing.

    Transformations after it see the corrected gradient. Momentum after it is a linear filter, in which a correction reaches
    the parameters with the same weights as the gradient that it corrects. Adam's second moments are each replica's own.
    Weight decay of the parameters goes before it (``optax.add_decayed_weights``), as in the synchronous form. The method is
    given the mean of p gradients, and its update is multiplied by p. So weight decay and clipping inside a method
    (:func:`gradcomp_jax.dgc`) weigh as they do in p steps, with the parameters at the time when the sum arrives. The method's
    memory is in units of one step.

    With compression, a compressed mean arrives instead of :math:`\bar g_{n-t}`, and the rest later, from the method's memory.

    A gradient that is not finite on some worker, or so large that a sum could overflow, counts as zero there, in the worker's
    own update and in the sum; the other workers continue.

    Replicas differ: build the state with ``gc.init_state(..., replicas=True)``. State: :class:`DelayedState`; the sums
    take as many copies of the gradient as there are periods in ``delay`` steps. Wire: the method's, every ``every`` steps.

    Example:
        >>> method = gc.topk_sgd(axis_name="data", density=0.01)
        >>> tx = optax.chain(gc.delayed_average(method, axis_name="data", delay=4), optax.sgd(0.1))
        >>> state = gc.init_state(params, tx, mesh, replicas=True)
        >>> int(gc.staleness(state))  # before the first step
        0

    Args:
        method: an exchange of gradients, such as ``gc.dense(...)`` or ``gc.dgc(...)``.
        axis_name: the method's axis.
        delay: steps :math:`t` between a gradient (with ``every``, the last of a sum) and the arrival of its mean. With 0
            and ``every=1`` the update is the method's own.
        every: steps :math:`p` from one exchange to the next.
        compensate: whether replicas continue with their own gradients meanwhile.

    Returns:
        A transformation of per-device gradients. Its update, in float32, is each replica's own; without compensation it is
        equal on every worker.

    Raises:
        ValueError: for a negative delay or a period below 1; from ``init``, for parameters narrower than float32 where
            replicas differ: nothing would correct their different rounding errors.

    References:
        Zhu et al., 2021, Delayed Gradient Averaging, section 3 (NeurIPS); Zhu et al., 2020, Distributed Training Across the
        World. Ho et al., 2013, More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server.
    """
    delay = _checks.non_negative_int("delay", delay)
    every = _checks.positive_int("every", every)
    exchange = of_sums(method, every)
    synchronous = delay == 0 and every == 1
    slots = slots_of(delay, every)

    def init(params: PyTree) -> DelayedState:
        if compensate and not synchronous:
            need_wide(params)

        def ring(p: Any) -> PerDevice:
            return PerDevice(_compat.varying(jnp.zeros((slots, *jnp.shape(p)), jnp.float32), axis_name), slots)

        flying = () if synchronous else jax.tree.map(ring, params)
        zero, inner = jnp.zeros((), jnp.int32), exchange.init(_compat.invarying(params, axis_name))
        return DelayedState(zero, nonfinite.counter(axis_name), flying, inner, delay, every)

    def update(updates: PyTree, state: DelayedState, params: PyTree | None = None, **extra: Any) -> Any:
        if synchronous:
            means, inner = exchange.update(updates, state.method, params, **extra)
            return means, dataclasses.replace(state, step=count_on(state.step), method=inner)
        if compensate and params is not None:
            nonfinite.need_replicas(params, axis_name, "delayed_average with compensation")
        # Sums of ``every`` gradients must not be too large for the exchange.
        own, ok = nonfinite.or_zeros(updates, largest_of((_compat.axis_size(axis_name) or 1) * every))
        before = landing(state.flying, state.step, delay, every)
        flying = added(state.flying, own, state.step, every)
        # Without a delay the sum that arrives contains this step's gradient.
        sums = before if delay else landing(flying, state.step, delay, every)

        def land(sums: PyTree, inner: Any) -> tuple[PyTree, Any]:
            means, inner = exchange.update(sums, inner, params, **extra)
            return (jax.tree.map(jnp.subtract, means, sums) if compensate else means), inner

        arrives = (state.step >= delay) & each_nth(state.step - delay, every) if every > 1 else True
        correction, inner = when(arrives, land, (None, state.method), sums, state.method)
        total = jax.tree.map(jnp.add, own, correction) if compensate else correction
        step = count_on(state.step, cycle=every * slots)
        new = DelayedState(step, nonfinite.count(state.dropped, ok), flying, inner, delay, every)
        # With compensation the numbers that are subtracted later must equal those added now: float32, as in the sums.
        return total if compensate else nonfinite.like(total, updates), new

    return of_state(DelayedState, init, update)


def of_sums(method: optax.GradientTransformation, every: int) -> optax.GradientTransformationExtraArgs:
    """Returns the method for sums of ``every`` gradients: it sees their mean, as weight decay and clipping expect.

    A linear method gives the same either way; fixed ranges are made for the gradient of one step too.
    """
    exchange = optax.with_extra_args_support(method)
    if every == 1:
        return exchange

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        means, state = exchange.update(mean_of(updates, every), state, params, **extra)
        return jax.tree.map(lambda m: m * every, means), state

    return optax.GradientTransformationExtraArgs(exchange.init, update)


def mean_of(sums: PyTree, every: int) -> PyTree:
    """Returns the mean over the ``every`` steps of a sum."""
    return sums if every == 1 else jax.tree.map(lambda s: s / every, sums)


def need_wide(params: PyTree) -> None:
    """Refuses parameters whose rounding would differ between an update now and its correction later.

    Methods that move replicas by differences of parameters see such rounding, and need no refusal.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = jnp.result_type(leaf)
        if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
            raise ValueError(
                f"the parameter {path_name(path)!r} is {dtype.name}: every replica rounds its own steps to that, what arrives"
                " does not take the rounding back, and replicas drift apart. Keep float32 master parameters and cast them in"
                f" the loss, x.astype({dtype.name!r}); or use compensate=False, with which replicas do not differ"
            )


def slots_of(delay: int, every: int) -> int:
    """Returns how many sums are kept: those in flight, and the one that is being added up.

    The oldest sum is read before the current one is written: if it arrives in the first step of a period, its slot is free.
    """
    if delay == 0:
        return 1
    periods = 1 + (delay - 1) // every
    return periods if (delay - 1) % every == 0 else periods + 1


def landing(flying: PyTree, step: Array, delay: int, every: int) -> PyTree:
    """Returns the sum that arrives in a step, if one does."""

    def read(mark: PerDevice) -> Array:
        period = (step - delay + 1) // every - 1
        return lax.dynamic_index_in_dim(mark.value, period % mark.rows, keepdims=False)

    return jax.tree.map(read, flying, is_leaf=is_per_device)


def added(flying: PyTree, own: PyTree, step: Array, every: int) -> PyTree:
    """Returns the sums with a step's gradients added to their period's, which begins at zero."""

    def write(mark: PerDevice, value: Array) -> PerDevice:
        slot = (step // every) % mark.rows
        if every > 1:
            so_far = lax.dynamic_index_in_dim(mark.value, slot, keepdims=False)
            value = value + jnp.where(step % every == 0, 0.0, so_far)
        return dataclasses.replace(mark, value=lax.dynamic_update_index_in_dim(mark.value, value, slot, 0))

    return jax.tree.map(write, flying, own, is_leaf=is_per_device)
