"""Eight-bit floating point."""

from typing import Any, Literal

import optax

from gradcomp_jax import collectives, compressors
from gradcomp_jax._typing import AxisName
from gradcomp_jax.core import Mask
from gradcomp_jax.methods.registry import GATHERS, averaged, feedback, register


@register(kept="residual", momentum="after", collectives=GATHERS, paper="2209.05433")
def fp8(
    *,
    axis_name: AxisName | None,
    format: Literal["e4m3", "e5m2"] = "e4m3",
    block: int = 256,
    scaled: bool = True,
    error_feedback: bool = True,
    collective: collectives.Collective | str = "auto",
    memory_dtype: Any = "float32",
    mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Sends eight-bit floats as bytes, so that no backend widens them, and sums in float32.

    With a scale, the largest entry of each block becomes the format's largest number, so nothing saturates and small gradients
    keep their bits. Momentum or Adam go after it.

    Example:
        >>> tx = optax.chain(gc.fp8(axis_name="data", format="e4m3"), optax.adam(1e-3))
        >>> gc.planning.traffic.read(gc.fp8, params, workers=8).sent  # bytes a worker sends in a step
        118279

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        format: ``e4m3`` (3 bits of mantissa) or ``e5m2`` (2 bits, and a wider range within a block).
        block: entries that share a scale.
        scaled: one float32 scale for each block; otherwise plain casts.
        error_feedback: keeps rounding errors.
        collective: see :func:`gradcomp_jax.exchange`. By default the cheaper of ``all_gather`` and ``two_phase``.
        memory_dtype: what the residual is kept in, see :func:`gradcomp_jax.memory.residual`.
        mask: which leaves to compress, see :func:`gradcomp_jax.exchange`.

    Returns:
        A transformation of per-device gradients. Its update is their compressed mean, in their shapes and dtypes, equal on
        every worker.

    Raises:
        ValueError: for values out of range, and for a ``memory_dtype`` without error feedback.

    References:
        Micikevicius et al., 2022, https://arxiv.org/abs/2209.05433, section 3.
    """
    code = compressors.float8(format, block=block, scaled=scaled)
    kept = feedback(error_feedback, memory_dtype)
    return averaged(code, axis_name=axis_name, memory=kept, collective=collective, mask=mask)
