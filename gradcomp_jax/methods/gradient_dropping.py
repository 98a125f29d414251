"""Gradient dropping (Aji and Heafield, 2017)."""

from typing import Any

import optax

from gradcomp_jax import collectives, compressors, memory
from gradcomp_jax._typing import AxisName
from gradcomp_jax.core import Mask
from gradcomp_jax.methods.registry import SELECTS, averaged, register


@register(
    kept="residual",
    momentum="after",
    collectives=SELECTS,
    paper="1704.05021",
    caution="a layer with small gradients waits long",
    adam_b1=0.0,
)
def gradient_dropping(
    *,
    axis_name: AxisName | None,
    density: float = 0.01,
    block: int | None = None,
    dtype: Any = "bfloat16",
    collective: collectives.Collective | str = "auto",
    memory_dtype: Any = "float32",
    mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Sends the largest entries of all tensors together; the rest is added to the next gradient.

    :math:`x = g + e`; the entries of x above one threshold for the whole gradient are sent; :math:`e \leftarrow x - sent`;
    the update is the mean of what was sent.

    The tensors are laid end to end and dealt out over blocks in turn, so that each block is a sample of all of them. The
    largest of each block are then nearly those above one threshold. Yet every block sends equally many: shapes are static
    and all owners have the same work. A layer with larger gradients sends more of them.

    Momentum or Adam go after it.

    Example:
        >>> tx = optax.chain(gc.gradient_dropping(axis_name="data", density=0.01), optax.sgd(0.1))
        >>> gc.planning.traffic.read(gc.gradient_dropping, params, workers=8).sent  # bytes a worker sends in a step
        8106

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        density: fraction of the entries to send; the paper drops 99%.
        block: as for :func:`gradcomp_jax.topk_sgd`.
        dtype: dtype of values on the wire, bfloat16 or float32.
        collective: as for :func:`gradcomp_jax.topk_sgd`.
        memory_dtype: what the residual is kept in, see :func:`gradcomp_jax.memory.residual`.
        mask: which leaves to compress, see :func:`gradcomp_jax.exchange`.

    Returns:
        A transformation of per-device gradients. Its update is their compressed mean, in their shapes and dtypes, equal on
        every worker.

    Raises:
        ValueError: for values out of range.
        TypeError: for a density that is traced.

    References:
        Aji and Heafield, 2017, https://arxiv.org/abs/1704.05021, section 3.
    """
    code, kept = compressors.topk(density, block=block, dtype=dtype), memory.residual(dtype=memory_dtype)
    return averaged(code, axis_name=axis_name, memory=kept, collective=collective, mask=mask, view="tree")
