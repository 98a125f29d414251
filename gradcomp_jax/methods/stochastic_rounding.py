"""Fixed point with stochastic rounding (Gupta et al., 2015)."""

from typing import Any

import optax

from gradcomp_jax import collectives, compressors, memory
from gradcomp_jax._typing import AxisName
from gradcomp_jax.core import Mask
from gradcomp_jax.kernels.random import Generator
from gradcomp_jax.methods.registry import GATHERS, averaged, register


@register(kept="nothing", momentum="after", collectives=GATHERS, paper="1502.02551", biased=False)
def stochastic_rounding(
    *,
    axis_name: AxisName | None,
    bits: int = 16,
    fraction_bits: int = 12,
    collective: collectives.Collective | str = "auto",
    mask: Mask | None = None,
    generator: Generator = "hash",
    key: Any = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Rounds stochastically to fixed-point numbers on one grid for all tensors, so that the expectation is exact.

    The grid's step is :math:`\epsilon = 2^{-F}`. No scale crosses the wire, and none adapts: the range must fit the
    gradients. Values beyond the range saturate, and values below the step survive only in expectation.

    Momentum or Adam go after it.

    Example:
        >>> tx = optax.chain(gc.stochastic_rounding(axis_name="data"), optax.sgd(0.1))
        >>> gc.planning.traffic.read(gc.stochastic_rounding, params, workers=8).sent  # bytes a worker sends in a step
        231182

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        bits: 16 or 8.
        fraction_bits: F; 16 bits with the default reach from -8 to 8 in steps of 0.00024.
        collective: see :func:`gradcomp_jax.exchange`. By default the cheaper of ``all_gather`` and ``two_phase``.
        mask: which leaves to compress, see :func:`gradcomp_jax.exchange`.
        generator: random numbers, ``hash`` or ``threefry``.
        key: seed (int) or typed JAX key.

    Returns:
        A transformation of per-device gradients. Its update is their mean on the grid, in their shapes and dtypes, equal on
        every worker.

    Raises:
        ValueError: for values out of range.

    References:
        Gupta et al., 2015, https://arxiv.org/abs/1502.02551, section 3.
    """
    code = compressors.fixed_point(bits=bits, fraction_bits=fraction_bits, generator=generator)
    return averaged(code, axis_name=axis_name, memory=memory.none(), collective=collective, mask=mask, key=key)
