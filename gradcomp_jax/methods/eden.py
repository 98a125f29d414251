"""EDEN and DRIVE (Vargaftik et al., 2021 and 2022)."""

from typing import Any

import optax

from gradcomp_jax import collectives, compressors
from gradcomp_jax._typing import AxisName
from gradcomp_jax.core import Mask
from gradcomp_jax.methods.registry import GATHERS, averaged, feedback, register


@register(kept="nothing", momentum="after", collectives=GATHERS, paper="2108.08842", biased=False)
def eden(
    *,
    axis_name: AxisName | None,
    bits: int = 4,
    block: int = 1024,
    error_feedback: bool = False,
    collective: collectives.Collective | str = "auto",
    memory_dtype: Any = "float32",
    mask: Mask | None = None,
    key: Any = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Rotates at random, then takes the best 1 to 4 bit levels for a Gaussian: the least error known for these widths.

    :math:`y = R x` with a randomized Hadamard rotation of each block, :math:`q = Q(y)` the nearest Lloyd-Max levels,
    decoded to :math:`S R^{-1} q`. Without error feedback :math:`S = \|x\|^2 / \langle y, q \rangle`, which is unbiased
    over the rotations to a thousandth of a block's norm (two or three rotations, for blocks of 32 or more, see
    :func:`gradcomp_jax.compressors.rotated`). With error feedback there is one rotation, and
    :math:`S = \langle y, q \rangle / \|q\|^2`, which has the least error.

    Every worker has its own rotations, so that errors average out. Momentum or Adam go after it.

    Example:
        >>> tx = optax.chain(gc.eden(axis_name="data", bits=4), optax.adam(1e-3))
        >>> gc.planning.traffic.read(gc.eden, params, workers=8).sent  # bytes a worker sends in a step
        59591

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        bits: 1 (DRIVE), 2, 3 or 4; three take 3.2 on the wire.
        block: entries that are rotated together, a power of two.
        error_feedback: keeps what was not sent; otherwise the code is unbiased and there is no memory.
        collective: see :func:`gradcomp_jax.exchange`. By default the cheaper of ``all_gather`` and ``two_phase``.
        memory_dtype: what the residual is kept in, see :func:`gradcomp_jax.memory.residual`.
        mask: which leaves to compress, see :func:`gradcomp_jax.exchange`.
        key: seed (int) or typed JAX key of the rotations.

    Returns:
        A transformation of per-device gradients. Its update is their compressed mean, in their shapes and dtypes, equal on
        every worker.

    Raises:
        ValueError: for values out of range, and for a ``memory_dtype`` without error feedback.

    References:
        Vargaftik et al., 2021, DRIVE, https://arxiv.org/abs/2105.08339; 2022, EDEN, https://arxiv.org/abs/2108.08842.
    """
    code = compressors.rotated(bits, block=block, unbiased=not error_feedback)
    kept = feedback(error_feedback, memory_dtype)
    return averaged(code, axis_name=axis_name, memory=kept, collective=collective, mask=mask, key=key)
