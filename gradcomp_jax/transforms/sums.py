"""Sums of an exchange's updates: of all of them (EF21), and with a decay (PowerSGD's momentum)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _arguments, _checks, kernels
from gradcomp_jax._typing import PyTree
from gradcomp_jax.core.changed import only_of
from gradcomp_jax.core.context import with_context
from gradcomp_jax.core.refusals import refuse_beyond_float32
from gradcomp_jax.transforms.skipping import keep_if, took_place


class RunningSumState(NamedTuple):
    """Holds the state of :func:`running_sum`.

    Attributes:
        total: the sum, float32 in the parameters' shapes, equal on every worker.
        inner: the exchange's state.
    """

    total: PyTree
    inner: Any


@_arguments.checked
def running_sum(exchange: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    r"""Makes updates that are the sum of all updates of an exchange so far: :math:`u_t = \sum_{s \le t} \bar c_s`.

    With :func:`gradcomp_jax.memory.estimate` inside, the sum is the mean of the workers' estimates. Where the exchange was
    skipped the sum stays and the update is zero.

    The exchange is given gradients of any dtype in float32, and sees every leaf as float32: its means are
    added up unrounded, and only the sum is cast to the gradients' dtype.

    Example:
        >>> differences = gc.exchange(gc.compressors.topk(0.01), axis_name="data", memory=gc.memory.estimate())
        >>> tx = optax.chain(gc.running_sum(differences), optax.sgd(0.01))
        >>> state = gc.init_state(params, tx, mesh)

    Args:
        exchange: the exchange, or a chain that ends in one.

    Returns:
        A transformation with the inputs of ``exchange``, whose updates are the sums.

    Raises:
        ValueError: when traced, if there is no exchange inside.
    """

    def init(params: PyTree) -> RunningSumState:
        zeros = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params)
        return RunningSumState(zeros, exchange.init(zeros))

    def update(updates: PyTree, state: RunningSumState, params: PyTree | None = None, **extra: Any) -> Any:
        # An exchange returns updates in its leaves' dtype, and no worker's memory keeps that rounding: over the steps it
        # would add up.
        refuse_beyond_float32(updates)
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        steps, inner = exchange.update(wide, state.inner, params, **with_context(extra, dtypes=None))
        ok = took_place(state.inner, inner)
        moved = jax.tree.map(jnp.add, state.total, steps)
        delivered = jax.tree.map(lambda m, g: kernels.narrowed(jnp.where(ok, m, 0.0), g.dtype), moved, updates)
        return delivered, RunningSumState(keep_if(ok, moved, state.total), inner)

    return optax.GradientTransformationExtraArgs(init, only_of(RunningSumState, update))


def plus_trace(decay: Any) -> optax.GradientTransformation:
    r"""Adds to every update the trace of all updates up to it: :math:`m \leftarrow \lambda m + u`, update :math:`u + m`.

    ``optax.trace(decay, nesterov=True)`` is a different sum, :math:`u + \lambda m`. State: that of ``optax.trace``, one array
    for each parameter, equal on every worker.

    Args:
        decay: :math:`\lambda`, in [0, 1).

    Raises:
        ValueError: for a decay outside [0, 1).

    References:
        Vogels et al., 2019, https://arxiv.org/abs/1905.13727, algorithm 2, lines 11 and 12.
    """
    trace = optax.trace(_checks.below_one("momentum", decay))

    def update(
        updates: PyTree, state: optax.TraceState, params: PyTree | None = None
    ) -> tuple[PyTree, optax.TraceState]:
        traced, state = trace.update(updates, state, params)
        return jax.tree.map(jnp.add, updates, traced), state

    return optax.GradientTransformation(trace.init, update)
