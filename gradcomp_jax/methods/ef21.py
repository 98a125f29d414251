"""EF21 (Richtarik et al., 2021)."""

from typing import Any

import optax

from gradcomp_jax import collectives, compressors, memory
from gradcomp_jax._typing import AxisName
from gradcomp_jax.core import Mask
from gradcomp_jax.methods.registry import SELECTS, averaged, register
from gradcomp_jax.transforms import running_sum


@register(
    kept="estimate",
    momentum="after",
    collectives=SELECTS,
    paper="2106.05203",
    caution="it wants shorter steps than SGD",
    adam_b1=0.0,
)
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

    Example:
        >>> tx = optax.chain(gc.ef21(axis_name="data", density=0.01), optax.sgd(0.01))
        >>> gc.planning.traffic.read(gc.ef21, params, workers=8).sent  # bytes a worker sends in a step
        8106

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        density: fraction of the entries to send.
        block: as for :func:`gradcomp_jax.topk_sgd`.
        dtype: dtype of values on the wire, bfloat16 or float32.
        collective: as for :func:`gradcomp_jax.topk_sgd`.
        mask: which leaves to compress, see :func:`gradcomp_jax.exchange`.

    Returns:
        A transformation of per-device gradients. Its update is the mean of their estimates, in their shapes and dtypes,
        equal on every worker.

    Raises:
        ValueError: for values out of range.
        TypeError: for a density that is traced.

    References:
        Richtarik et al., 2021, https://arxiv.org/abs/2106.05203, algorithm 2.
    """
    code, kept = compressors.topk(density, block=block, dtype=dtype), memory.estimate()
    return running_sum(averaged(code, axis_name=axis_name, memory=kept, collective=collective, mask=mask))
