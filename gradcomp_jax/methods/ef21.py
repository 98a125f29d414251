"""EF21 (Richtarik et al., 2021)."""

from typing import Any

import optax

from gradcomp_jax import collectives, compressors, memory
from gradcomp_jax._typing import AxisName
from gradcomp_jax.methods.registry import SELECTS, register
from gradcomp_jax.transforms import Mask, exchange, running_sum


@register(kept="estimate", momentum="after", collectives=SELECTS, paper="2106.05203")
def ef21(
    *,
    axis_name: AxisName | None,
    density: float = 0.01,
    block: int | None = None,
    dtype: Any = "bfloat16",
    collective: collectives.Collective | str = "auto",
    mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Sends how each worker's gradient differs from what was sent before; the update is the mean estimate.

    :math:`c^i = C(g^i - \hat g^i)`, :math:`\hat g^i \leftarrow \hat g^i + c^i`, and the update is
    :math:`\frac1N \sum_i \hat g^i`, a running sum of the means of the :math:`c^i`. The update is an estimate of the whole
    gradient in every step, not a part of it; it suits gradients that change slowly (large batches).

    Momentum or Adam go after it.

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        density: fraction of the entries to send.
        block: entries among which the largest are chosen; 1024 by default, longer for densities that need it.
        dtype: of values on the wire, bfloat16 or float32.
        collective: see :func:`gradcomp_jax.exchange`. By default ``all_gather`` for two workers and ``two_phase`` for more,
            where owners keep what they do not send in a residual of their own.
        mask: which leaves to compress, see :func:`gradcomp_jax.exchange`; by default those with two or more dimensions that
            get smaller.

    Raises:
        ValueError: for values out of range.
        TypeError: for a density that is traced.

    References:
        Richtarik et al., 2021, https://arxiv.org/abs/2106.05203, algorithm 2.
    """
    differences = exchange(
        compressors.topk(density, block=block, dtype=dtype),
        axis_name=axis_name,
        memory=memory.estimate(),
        collective=collectives.as_collective(collective, lossy_downlink=True),
        mask=mask,
    )
    return running_sum(differences)
