"""SparCML's sparse all-reduce (Renggli et al., 2019)."""

from typing import Any, Literal

import optax

from gradcomp_jax import _checks, collectives, compressors, memory
from gradcomp_jax._typing import AxisName
from gradcomp_jax.core import Mask, exchange
from gradcomp_jax.methods.registry import register

_BITS = {"int8": 8, "int4": 4, "int2": 2}


@register(
    kept="residual", momentum="after", collectives=("two_phase", "recursive_doubling"), paper="1802.08021", adam_b1=0.0
)
def sparcml(
    *,
    axis_name: AxisName | None,
    density: float = 0.01,
    block: int | None = None,
    algorithm: Literal["split", "recursive_doubling"] = "split",
    downlink: Literal["exact", "int8", "int4", "int2"] = "exact",
    dtype: Any = "float32",
    memory_dtype: Any = "float32",
    mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Sums top-k entries exactly, in sparse form as long as that is fewer bytes.

    With ``split``, entries go to the owners of their blocks, which sum them and send the union of all workers' entries to all
    workers. The union is sent as indices and values, or as whole blocks if :math:`N k` of those cost more (decided from
    shapes), or quantized. ``recursive_doubling`` takes log2(N) rounds, and sends entries until the dense sum is fewer bytes.

    Unlike :func:`gradcomp_jax.topk_sgd` in two phases, nothing that any worker sent is held back; that is up to N times
    the bytes of the downlink. :math:`x = g + e`, :math:`e \leftarrow x - sent`. Momentum goes after it.

    Example:
        >>> tx = optax.chain(gc.sparcml(axis_name="data", density=0.01), optax.sgd(0.1))
        >>> gc.planning.traffic.read(gc.sparcml, params, workers=8).sent  # bytes a worker sends in a step
        35826

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        density: fraction of the entries to send.
        block: entries among which the largest are chosen; 1024 by default, longer for densities that need it.
        algorithm: ``split`` (SSAR and DSAR split all-gather) or ``recursive_doubling`` (SSAR recursive doubling; N must be a
            power of two).
        downlink: for ``split``: ``exact``, or blocks of integers, whose rounding errors stay with the owner.
        dtype: dtype of the values that workers send, float32 or bfloat16.
        memory_dtype: what the residual is kept in, see :func:`gradcomp_jax.memory.residual`.
        mask: which leaves to compress, see :func:`gradcomp_jax.exchange`.

    Returns:
        A transformation of per-device gradients. Its update is their compressed mean, in their shapes and dtypes, equal on
        every worker.

    Raises:
        ValueError: for values out of range, and for a downlink that the algorithm does not have.
        TypeError: for a density that is traced.

    References:
        Renggli et al., 2019, https://arxiv.org/abs/1802.08021, sections 5.3 and 6.
    """
    _checks.one_of("algorithm", algorithm, ("split", "recursive_doubling"))
    _checks.one_of("downlink", downlink, ("exact", *_BITS))
    if algorithm == "recursive_doubling" and downlink != "exact":
        raise ValueError("downlink is for algorithm='split'; recursive doubling has one phase")
    first = compressors.topk(density, block=block, dtype=dtype)
    if downlink == "exact":
        code = compressors.topk(density, block=block, dtype=dtype, downlink="union")
    else:
        quantized = compressors.block_quantized(bits=_BITS[downlink], block=first.block)
        code = compressors.topk(density, block=block, dtype=dtype, downlink=quantized)
    return exchange(
        code,
        axis_name=axis_name,
        memory=memory.residual(dtype=memory_dtype),
        collective=collectives.RecursiveDoubling() if algorithm == "recursive_doubling" else collectives.TwoPhase(),
        mask=mask,
    )
