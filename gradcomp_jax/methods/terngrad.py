"""TernGrad (Wen et al., 2017)."""

from typing import Any, Literal

import optax

from gradcomp_jax import collectives, compressors, memory
from gradcomp_jax._typing import AxisName
from gradcomp_jax.core import Mask, exchange
from gradcomp_jax.kernels.random import Generator
from gradcomp_jax.methods.registry import GATHERS, refuse_without_downlink, register


@register(
    kept="nothing",
    momentum="after",
    collectives=(*GATHERS, "all_reduce"),
    paper="1705.07878",
    biased=False,
    may_change=("clip",),
)
def terngrad(
    *,
    axis_name: AxisName | None,
    clip: float | None = 2.5,
    granularity: Literal["tensor", "bucket"] = "tensor",
    bucket_size: int = 2048,
    share_scale: bool = True,
    downlink: Literal["exact", "ternary"] = "exact",
    collective: collectives.Collective | str = "auto",
    mask: Mask | None = None,
    generator: Generator = "hash",
    key: Any = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Sends gradients in {-s, 0, s}, unbiased, 1.6 bits a value.

    On worker :math:`i`: clip at :math:`c\,\sigma`, scale :math:`s = \max_i \max|g^i|`, and
    :math:`t^i_j = sign(g^i_j)` with probability :math:`|g^i_j| / s`, else 0.
    The update is :math:`s\,\frac1N \sum_i t^i`. There is no memory: the code is unbiased except for the clipping.

    Uplink: five values in a byte. Downlink: ``exact`` is the integer sum, 2N + 1 levels, packed as digits (4.57 bits at
    N = 8); ``ternary`` is ternarized again, with a scale for each bucket: 1.6 bits, noisier. Momentum or Adam go after
    it. The paper keeps the last classification layer dense: leave it out with ``mask=gc.masks.without("classifier")``.

    Example:
        >>> tx = optax.chain(gc.terngrad(axis_name="data"), optax.sgd(0.1))
        >>> gc.planning.traffic.read(gc.terngrad, params, workers=8).sent  # bytes a worker sends in a step
        46123

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        clip: c, in standard deviations; ``None`` does not clip.
        granularity: one scale for each ``tensor`` (layer-wise) or for each ``bucket``.
        bucket_size: entries of a bucket.
        share_scale: workers agree on the largest scale; ``exact`` needs it.
        downlink: what owners send, ``exact`` or ``ternary``.
        collective: see :func:`gradcomp_jax.exchange`; ``"all_reduce"`` adds int8 values, for at most 127 workers.
        mask: which leaves to compress, see :func:`gradcomp_jax.exchange`.
        generator: random numbers, ``hash`` or ``threefry``.
        key: seed (int) or typed JAX key.

    Returns:
        A transformation of per-device gradients. Its update is their compressed mean, in their shapes and dtypes, equal on
        every worker.

    Raises:
        ValueError: for values out of range or combinations that do not work.

    References:
        Wen et al., 2017, TernGrad, https://arxiv.org/abs/1705.07878.
    """
    resolved = collectives.as_collective(collective, lossy_downlink=downlink == "ternary")
    if downlink == "ternary" and share_scale:
        refuse_without_downlink("downlink='ternary'", resolved)
    code = compressors.ternary(
        bucket_size=bucket_size,
        clip=clip,
        granularity=granularity,
        share_scale=share_scale,
        packing="int8" if isinstance(resolved, collectives.AllReduce) else "base3",
        downlink=downlink,
        generator=generator,
    )
    return exchange(code, axis_name=axis_name, memory=memory.none(), collective=resolved, mask=mask, key=key)
