"""Momentum correction: the momentum is applied before the compression, on every worker."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from gradcomp_jax import _arguments, _checks
from gradcomp_jax._typing import Array
from gradcomp_jax.memory.base import Memory
from gradcomp_jax.memory.narrow import memory_dtype


class Momentum(NamedTuple):
    """Attributes: ``velocity`` u and ``accumulated`` v, ``[rows, block]`` as the memory's dtype has them."""

    velocity: Any
    accumulated: Any


@dataclasses.dataclass(frozen=True)
class MomentumCorrection(Memory):
    """See :func:`momentum_correction`."""

    momentum: Any
    nesterov: bool
    masking: bool
    by_entry = True

    def on_dense(self, *, lossless: bool) -> "MomentumCorrection":
        """Keeps no mask: where all entries are sent, a velocity is ordinary momentum and must continue."""
        return dataclasses.replace(self, masking=False)

    def held(self, memory: Momentum) -> Array:
        """Returns the accumulated velocities."""
        return memory.accumulated

    def init(self, rows: Array) -> Momentum:
        """Returns zeros, of which no two share a buffer: both are donated."""
        return Momentum(rows, jnp.zeros_like(rows))

    def compensate(self, gradient: Array, memory: Momentum) -> tuple[Array, Momentum]:
        """Adds the gradient to the velocity and the velocity to what was not sent."""
        if self.nesterov:
            velocity = self.momentum * (memory.velocity + gradient)
            target = memory.accumulated + velocity + gradient
        else:
            velocity = self.momentum * memory.velocity + gradient
            target = memory.accumulated + velocity
        return target, Momentum(velocity, target)

    def update(self, target: Array, sent: Array, sent_mask: Array, memory: Momentum) -> Momentum:
        """Keeps what was not sent; stops the velocity of what was (factor masking)."""
        # A product with 0 or 1: a choice between 0 and what has to be loaded becomes masked loads on CPU, which cost more.
        velocity = memory.velocity * jnp.where(sent_mask, 0.0, 1.0) if self.masking else memory.velocity
        return Momentum(velocity, target - sent)


@_arguments.checked
def momentum_correction(
    momentum: Any = 0.9, *, nesterov: bool = False, masking: bool = True, dtype: Any = "float32"
) -> MomentumCorrection:
    r"""Makes Deep Gradient Compression's memory: :math:`u = m u + g`, :math:`v = v + u`, send from v, keep the rest.

    With Nesterov momentum :math:`u = m (u + g)`, :math:`v = v + u + g`. Entries that are sent leave v, and with
    ``masking`` leave u as well, so that an old velocity does not push them in a stale direction; a code that sends all entries,
    such as a quantizer, is never masked. The optimizer after the exchange must be plain SGD: the momentum lives here.

    Args:
        momentum: m, in [0, 1).
        nesterov: the look-ahead form.
        masking: momentum factor masking.
        dtype: what u and v are kept in, as for :func:`residual`; each is rounded by draws of its own.

    Raises:
        ValueError: for a momentum outside [0, 1), or another dtype.

    References:
        Lin et al., 2018, https://arxiv.org/abs/1712.01887, sections 3.1 and 3.2.
    """
    _checks.below_one("momentum", momentum)
    return MomentumCorrection(momentum, nesterov, masking, dtype=memory_dtype(dtype))
