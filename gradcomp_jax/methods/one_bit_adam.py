"""1-bit Adam (Tang et al., 2021)."""

from typing import Any

import optax

from gradcomp_jax import collectives, compressors, memory
from gradcomp_jax._typing import AxisName
from gradcomp_jax.core import Mask, exchange
from gradcomp_jax.methods.registry import register
from gradcomp_jax.transforms import frozen_adam


@register(
    kept="residual",
    momentum="inside",
    collectives=("two_phase",),
    paper="2102.02888",
    update="direction",
    warm_up_steps=100,
    caution="it is Adam itself, and its first steps are dense",
    may_change=("b1", "b2", "eps", "floor", "warm_up_steps"),
)
def one_bit_adam(
    *,
    axis_name: AxisName | None,
    warm_up_steps: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    floor: float = 0.1,
    block: int = 2048,
    memory_dtype: Any = "float32",
    mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Runs Adam, dense at first; then its variance freezes and its momentum crosses as signs.

    The warm-up is Adam on the mean gradient. After it v is a constant preconditioner, and every worker sends
    :math:`\beta_1 m + (1 - \beta_1) g^i` plus its residual as scaled signs. The owners add their own residual to the mean and
    send scaled signs back, which are the new m. The update is Adam's direction: chain a learning rate after it, and no other
    momentum.

    The owners' residual depends on the number of workers: initialise inside the axis (``gc.init_state`` does).

    Example:
        >>> tx = optax.chain(gc.one_bit_adam(axis_name="data", warm_up_steps=1000), optax.scale_by_learning_rate(3e-4))
        >>> compressed = functools.partial(gc.one_bit_adam, warm_up_steps=1000)
        >>> gc.planning.traffic.read(compressed, params, workers=8).sent  # bytes a worker sends in a step
        16359

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        warm_up_steps: dense steps before v freezes; the paper takes 15% to 20% of all steps.
        b1: decay of the momentum.
        b2: decay of the variance.
        eps: added to the root of the variance.
        floor: least root of the frozen variance, as a fraction of its root mean square over the tensor. A rounding error is
            divided by every entry's own root, and a root that is far too small makes training diverge. The paper has none (0).
        block: entries that share a magnitude.
        memory_dtype: what the residual is kept in, see :func:`gradcomp_jax.memory.residual`.
        mask: which leaves to compress, see :func:`gradcomp_jax.exchange`.

    Returns:
        A transformation of per-device gradients. Its update is Adam's direction, in their shapes and dtypes, equal on every
        worker: a learning rate follows.

    Raises:
        ValueError: for values out of range.

    References:
        Tang et al., 2021, https://arxiv.org/abs/2102.02888, algorithm 1.
    """
    compressed = exchange(
        compressors.sign("l1", block=block),
        axis_name=axis_name,
        memory=memory.residual(dtype=memory_dtype),
        collective=collectives.TwoPhase("server"),
        mask=mask,
    )
    whole = exchange(compressors.dense(), axis_name=axis_name, memory=memory.none())
    return frozen_adam(whole, compressed, warm_up_steps=warm_up_steps, b1=b1, b2=b2, eps=eps, floor=floor)
