"""EF-signSGD (Karimireddy et al., 2019)."""

from typing import Any

import optax

from gradcomp_jax import collectives, compressors, memory
from gradcomp_jax._typing import AxisName
from gradcomp_jax.core import Mask
from gradcomp_jax.methods.registry import GATHERS, averaged, register


@register(kept="residual", momentum="after", collectives=GATHERS, paper="1901.09847")
def ef_sign_sgd(
    *,
    axis_name: AxisName | None,
    block: int = 2048,
    collective: collectives.Collective | str = "two_phase",
    memory_dtype: Any = "float32",
    mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Sends signs with their mean magnitude, and keeps the error: 1 bit on the uplink and on the downlink.

    :math:`x = g + e`, sent: :math:`\frac{\|x\|_1}{n} sign(x)` for each block of n entries, :math:`e \leftarrow x - sent`.
    The owners do the same with the mean.

    Momentum goes after it.

    Example:
        >>> tx = optax.chain(gc.ef_sign_sgd(axis_name="data"), optax.sgd(0.1))
        >>> gc.planning.traffic.read(gc.ef_sign_sgd, params, workers=8).sent  # bytes a worker sends in a step
        16359

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        block: entries that share a magnitude. The paper takes a whole layer; a smaller block follows the gradient better.
        collective: see :func:`gradcomp_jax.exchange`.
        memory_dtype: what the residual is kept in, see :func:`gradcomp_jax.memory.residual`.
        mask: which leaves to compress, see :func:`gradcomp_jax.exchange`.

    Returns:
        A transformation of per-device gradients. Its update is their compressed mean, in their shapes and dtypes, equal on
        every worker.

    Raises:
        ValueError: for values out of range.

    References:
        Karimireddy et al., 2019, https://arxiv.org/abs/1901.09847, algorithm 1; Zheng et al., 2019,
        https://arxiv.org/abs/1905.10936 (blocks, and both directions).
    """
    code, kept = compressors.sign("l1", block=block), memory.residual(dtype=memory_dtype)
    return averaged(code, axis_name=axis_name, memory=kept, collective=collective, mask=mask)
