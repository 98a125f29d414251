"""Error feedback of 2021: what is sent is the difference to an estimate that every worker's receivers share."""

import dataclasses

from gradcomp_jax._typing import Array
from gradcomp_jax.memory.base import Memory


@dataclasses.dataclass(frozen=True)
class Estimate(Memory):
    """See :func:`estimate`."""

    @property
    def counts_sent(self) -> bool:
        """Returns true: the estimate is the sum of what was sent."""
        return True

    def init(self, rows: Array) -> Array:
        """Returns an estimate of zeros."""
        return rows

    def compensate(self, gradient: Array, memory: Array) -> tuple[Array, Array]:
        """Returns the gradient minus the estimate."""
        return gradient - memory, memory

    def update(self, target: Array, sent: Array, sent_mask: Array, memory: Array) -> Array:
        """Moves the estimate by what was sent."""
        del target, sent_mask
        return memory + sent


def estimate() -> Estimate:
    r"""EF21's memory: :math:`c_t = C(g_t - \hat g_{t-1})`, :math:`\hat g_t = \hat g_{t-1} + c_t`, with :math:`\hat g_0 = 0`.

    What is kept is :math:`g_t - \hat g_t`, the part of the gradient that the estimate lacks; nothing is added up over the
    steps. Every worker's update must be the running sum of the means of the :math:`c_t`, which is the mean of the
    estimates: see :func:`gradcomp_jax.running_sum`.

    References:
        Richtarik et al., 2021, EF21, https://arxiv.org/abs/2106.05203, algorithm 2.
    """
    return Estimate()
