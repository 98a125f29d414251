"""DeMo: decoupled momentum (Peng et al., 2024)."""

from collections.abc import Callable
from typing import Any, Literal

import optax

from gradcomp_jax import collectives, compressors, memory
from gradcomp_jax._typing import AxisName
from gradcomp_jax.core import Mask, exchange
from gradcomp_jax.methods.registry import register
from gradcomp_jax.transforms import rate_weighted


@register(
    kept="residual",
    momentum="inside",
    collectives=("all_gather", "two_phase"),
    paper="2411.19870",
    update="sign",
    caution="with `signed` the learning rate of a sign method",
    may_change=("momentum", "rate"),
)
def demo(
    *,
    axis_name: AxisName | None,
    density: float = 1 / 128,
    momentum: Any = 0.999,
    block: int = 4096,
    signed: bool = True,
    dtype: Any = "bfloat16",
    exact: bool = False,
    collective: collectives.Collective | str = "all_gather",
    memory_dtype: Any = "float32",
    mask: Mask | None = None,
    average: Literal["workers", "senders"] = "workers",
    rate: Callable[[Any], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Sends the largest frequencies of each worker's momentum and removes them; the rest stays and differs by worker.

    :math:`m \leftarrow \beta m + g`; the largest frequencies q of each chunk's cosine transform are sent;
    :math:`m \leftarrow m - IDCT(q)`; the update is the mean of the :math:`IDCT(q)`, or its sign.

    The momentum is inside the method: chain plain SGD after it. With ``signed`` the learning rate is that of a sign method.

    Example:
        >>> tx = optax.chain(gc.demo(axis_name="data", momentum=0.999), optax.sgd(3e-4))
        >>> gc.planning.traffic.read(gc.demo, params, workers=8).sent  # bytes a worker sends in a step
        16142

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        density: fraction of the frequencies to send; 1/128 is 32 of a chunk of 64 x 64, the paper's.
        momentum: :math:`\beta`, the decay of what was not sent.
        block: entries of a chunk, a stretch of the tensor seen as nearly square.
        signed: returns the sign of the mean, as in the paper's optimizer.
        dtype: dtype of values on the wire, bfloat16 or float32.
        exact: the paper's selection, by sorting each chunk, many times slower. Without it, one of the largest may be missed
            because of others near it. In a smooth momentum they are near each other, so more of it waits for a later step.
        collective: see :func:`gradcomp_jax.exchange`; the paper gathers.
        memory_dtype: what the momentum is kept in, see :func:`gradcomp_jax.memory.residual`.
        mask: which leaves to compress, see :func:`gradcomp_jax.exchange`.
        average: averages a frequency over all ``workers``, or over its ``senders`` as the official code does. The latter breaks
            the law that updates and momenta add up to all gradients, so it is not the default.
        rate: schedule of the learning rate, which then multiplies the gradients before the momentum, as in the official code;
            see :func:`gradcomp_jax.rate_weighted`. Without it, the momentum is of gradients.

    Returns:
        A transformation of per-device gradients. Its update, in their shapes and dtypes, is equal on every worker; with
        ``signed`` each entry is -1, 0 or 1.

    Raises:
        ValueError: for values out of range, and for an average over senders on another collective than ``all_gather``.
        TypeError: for a density that is traced.

    References:
        Peng et al., 2024, https://arxiv.org/abs/2411.19870, algorithm 1.
    """
    chosen = collectives.as_collective(collective, lossy_downlink=True)
    if average == "senders" and not isinstance(chosen, collectives.AllGather):
        raise ValueError(
            f"average='senders' counts who sent what, which {type(chosen).__name__} does not tell; use collective='all_gather'"
        )
    frequencies = exchange(
        compressors.in_frequency(compressors.topk(density, block=block, dtype=dtype, exact=exact), average=average),
        axis_name=axis_name,
        memory=memory.residual(decay=momentum, dtype=memory_dtype),
        collective=chosen,
        mask=mask,
    )
    if rate is not None:
        frequencies = rate_weighted(frequencies, rate)
    return optax.chain(frequencies, optax.scale_by_sign()) if signed else frequencies
