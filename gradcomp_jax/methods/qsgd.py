"""QSGD (Alistarh et al., 2017)."""

from typing import Any, Literal

import optax

from gradcomp_jax import collectives, compressors, memory
from gradcomp_jax._typing import AxisName
from gradcomp_jax.core import Mask
from gradcomp_jax.kernels.random import Generator
from gradcomp_jax.methods.registry import GATHERS, averaged, register


@register(kept="nothing", momentum="after", collectives=GATHERS, paper="1610.02132", biased=False)
def qsgd(
    *,
    axis_name: AxisName | None,
    bits: int = 4,
    norm: Literal["max", "l2"] = "max",
    bucket_size: int = 512,
    collective: collectives.Collective | str = "auto",
    mask: Mask | None = None,
    generator: Generator = "hash",
    key: Any = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Sends integers of few bits by stochastic rounding, unbiased, with one norm for each bucket.

    :math:`q_j = \|b\| \, sign(b_j) \, \xi_j / L`, where :math:`\xi_j` is :math:`L |b_j| / \|b\|` rounded up or down at
    random so that :math:`E[q] = b`, and :math:`L = 2^{bits-1} - 1` (127, 7 or 1). There is no memory. Where two phases send
    fewer bytes, the owners quantize the mean again, which is unbiased too.

    Momentum or Adam go after it.

    Example:
        >>> tx = optax.chain(gc.qsgd(axis_name="data", bits=4), optax.adam(1e-3))
        >>> gc.planning.traffic.read(gc.qsgd, params, workers=8).sent  # bytes a worker sends in a step
        60039

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        bits: 8, 4 or 2.
        norm: ``max``, the largest magnitude (the paper's experiments), or ``l2`` (its analysis), under which most entries
            of a bucket are zero and the variance is larger.
        bucket_size: entries that share a norm.
        collective: see :func:`gradcomp_jax.exchange`. By default the cheaper of ``all_gather`` and ``two_phase``.
        mask: which leaves to compress, see :func:`gradcomp_jax.exchange`.
        generator: random numbers, ``hash`` or ``threefry``.
        key: seed (int) or typed JAX key.

    Returns:
        A transformation of per-device gradients. Its update is their compressed mean, in their shapes and dtypes, equal on
        every worker.

    Raises:
        ValueError: for values out of range.

    References:
        Alistarh et al., 2017, https://arxiv.org/abs/1610.02132, sections 3.1 and 4.
    """
    code = compressors.block_quantized(bits=bits, block=bucket_size, stochastic=True, norm=norm, generator=generator)
    return averaged(code, axis_name=axis_name, memory=memory.none(), collective=collective, mask=mask, key=key)
