"""The running sum of what an exchange delivers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax._typing import PyTree
from gradcomp_jax.transforms.skipping import keep_if, took_place


class RunningSumState(NamedTuple):
    """Attributes: ``total``, float32 in the parameters' shapes, equal on every worker; ``inner``, the exchange's state."""

    total: PyTree
    inner: Any


def running_sum(exchange: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    r"""Updates that are the sum of all updates of an exchange so far: :math:`u_t = \sum_{s \le t} \bar c_s`.

    With :func:`gradcomp_jax.memory.estimate` inside, that is the mean of the workers' estimates. Where the exchange was
    skipped the sum stays and the update is zero.

    Args:
        exchange: the exchange, or a chain that ends in one.

    Raises:
        ValueError: when traced, if there is no exchange inside.
    """

    def init(params: PyTree) -> RunningSumState:
        zeros = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params)
        return RunningSumState(zeros, exchange.init(params))

    def update(updates: PyTree, state: RunningSumState, params: PyTree | None = None, **extra: Any) -> Any:
        steps, inner = exchange.update(updates, state.inner, params, **extra)
        ok = took_place(state.inner, inner)
        moved = jax.tree.map(lambda t, s: t + s.astype(jnp.float32), state.total, steps)
        delivered = jax.tree.map(lambda m, s: jnp.where(ok, m, 0.0).astype(s.dtype), moved, steps)
        return delivered, RunningSumState(keep_if(ok, moved, state.total), inner)

    return optax.GradientTransformationExtraArgs(init, update)
