"""Error feedback: what was not sent is added to the next gradient; or, in EF21, what is sent updates a common estimate."""

import dataclasses
from typing import Any

from gradcomp_jax import _arguments, _checks
from gradcomp_jax._typing import Array
from gradcomp_jax.memory.base import Memory, none
from gradcomp_jax.memory.narrow import memory_dtype


@dataclasses.dataclass(frozen=True)
class Residual(Memory):
    """Implements :func:`residual`."""

    decay: Any
    by_entry = True

    def on_dense(self, *, lossless: bool) -> Memory:
        """Returns a memory that keeps nothing of leaves that are sent without loss."""
        return none() if lossless else self

    def init(self, rows: Array) -> Array:
        """Returns a residual of zeros."""
        return rows

    def compensate(self, gradient: Array, memory: Array) -> tuple[Array, Array]:
        """Returns the gradient plus the residual."""
        # 1.0 is the default and needs no product: a multiplication by a traced decay would not fold away.
        kept = memory if isinstance(self.decay, (int, float)) and self.decay == 1 else self.decay * memory
        return gradient + kept, memory

    def update(self, target: Array, sent: Array, sent_mask: Array, memory: Array) -> Array:
        """Returns the target minus what was sent."""
        return target - sent


@_arguments.checked
def residual(*, decay: Any = 1.0, dtype: Any = "float32") -> Residual:
    r"""Makes error feedback, :math:`p_t = g_t + \gamma e_t`, :math:`e_{t+1} = p_t - D(C(p_t))`, with :math:`e_0 = 0`.

    Args:
        decay: :math:`\gamma`. Below 1 the memory forgets on purpose; the conservation law holds for what it has not forgotten.
        dtype: what the residual is kept in: ``float32``; ``bfloat16``, two bytes an entry; ``int8`` or ``float8_e4m3fn``, one
            byte, and a float32 scale for every 128 to 1,024 entries. Owners' residuals have the same dtype. Blocks of fewer
            than 16 entries, such as those of leaves that go dense, are bfloat16 instead of int8 or float8.

    A narrow residual is rounded stochastically: :math:`e_{t+1} = p_t - D(C(p_t)) + \rho_t`, where :math:`E[\rho_t] = 0` and
    :math:`\rho_t` is less than one step of the dtype's grid at that entry, with a standard deviation :math:`\sigma` of at most
    half a step. A step is 1/127 of the largest magnitude that shares the scale (int8), 1/8 (float8) or 1/128 (bfloat16) of the
    power of two below the entry. So the expectation of what is sent plus what is kept is the sum of the gradients, and the root
    mean square error is at most :math:`\sigma \sqrt t` after t steps. With rounding to the nearest value, small gradients would
    never change a large residual. A skipped step changes no bit.

    Raises:
        ValueError: for a negative decay, or another dtype.

    References:
        Seide et al., 2014 (Interspeech); Karimireddy et al., 2019, https://arxiv.org/abs/1901.09847.
    """
    _checks.at_least_zero("decay", decay)
    return Residual(decay, dtype=memory_dtype(dtype))


@dataclasses.dataclass(frozen=True)
class Estimate(Memory):
    """Implements :func:`estimate`."""

    by_entry = True

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
        """Returns the estimate plus what was sent."""
        return memory + sent


@_arguments.checked
def estimate() -> Estimate:
    r"""Makes EF21's memory, :math:`c_t = C(g_t - \hat g_{t-1})`, :math:`\hat g_t = \hat g_{t-1} + c_t`, :math:`\hat g_0 = 0`.

    What is kept is :math:`g_t - \hat g_t`, the part of the gradient that the estimate lacks; nothing is added up over the
    steps. Every worker's update must be the running sum of the means of the :math:`c_t`, which is the mean of the
    estimates: see :func:`gradcomp_jax.running_sum`.

    References:
        Richtarik et al., 2021, EF21, https://arxiv.org/abs/2106.05203, algorithm 2.
    """
    return Estimate()
