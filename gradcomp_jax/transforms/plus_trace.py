"""PowerSGD's momentum: every update counts once in full, and once more in a trace of all of them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _checks
from gradcomp_jax._typing import PyTree


def plus_trace(decay: Any) -> optax.GradientTransformation:
    r"""Adds to every update the trace of all updates with it: :math:`m \leftarrow \lambda m + u`, update :math:`u + m`.

    ``optax.trace(decay, nesterov=True)`` is :math:`u + \lambda m`, another sum. State: that of ``optax.trace``, one array for
    each parameter, equal on every worker.

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
