"""Top-k SGD with memory (Stich et al., 2018; Alistarh et al., 2018)."""

from typing import Any

import optax

from gradcomp_jax import collectives, compressors, memory
from gradcomp_jax._typing import AxisName
from gradcomp_jax.core import Mask, Policy, by_tensor
from gradcomp_jax.methods.registry import SELECTS, averaged, refuse_without_downlink, register

_TRAITS: dict[str, Any] = {
    "kept": "residual",
    "momentum": "after",
    "collectives": SELECTS,
    "paper": "1809.07599",
    "adam_b1": 0.0,
}


@register(
    **_TRAITS,
    name="topk_two_bits",
    caution="its residual is a first moment: an Adam after it has none, as gc.adamw makes it",
    bits=2,
    pack_positions=True,
)
@register(**_TRAITS, caution="the first steps send little of the gradient: start denser")
def topk_sgd(
    *,
    axis_name: AxisName | None,
    density: float = 0.01,
    block: int | None = None,
    downlink_density: float | None = None,
    dtype: Any = "bfloat16",
    bits: int | None = None,
    pack_positions: bool = False,
    exact: bool = False,
    collective: collectives.Collective | str = "auto",
    memory_dtype: Any = "float32",
    mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Sends the largest entries of every block of every tensor; the rest is added to the next gradient.

    :math:`x = g + e`, sent: the largest ``density * n`` entries of x, :math:`e \leftarrow x - sent`. The update is the
    mean of what was sent. Momentum goes after it; with momentum before the selection this is :func:`gradcomp_jax.dgc`.

    Example:
        >>> tx = optax.chain(gc.topk_sgd(axis_name="data", density=0.01), optax.sgd(0.1))
        >>> gc.planning.traffic.read(gc.topk_sgd, params, workers=8).sent  # bytes a worker sends in a step
        8106

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        density: fraction of the entries to send.
        block: entries among which the largest are chosen; 1024 by default, longer for densities that need it.
        downlink_density: fraction that the owners of a two-phase exchange send; by default half as many entries of a block
            again as a worker sends, rounded down, and at least one more.
        dtype: dtype of values on the wire: bfloat16, float32 or int8.
        bits: 2 for a sign and one of two magnitudes for each value, see :func:`gradcomp_jax.compressors.topk`.
        pack_positions: sends positions in order, in about half the bits.
        exact: the paper's selection, by sorting, many times slower: the largest entries of each whole tensor, or of every 2**20
            entries dealt from a longer one, instead of ``block``. A tensor is then one row, so use ``all_gather``.
        collective: see :func:`gradcomp_jax.exchange`. By default ``all_gather`` for two workers and ``two_phase`` for more,
            where owners keep what they do not send in their own residual.
        memory_dtype: what the residual is kept in, see :func:`gradcomp_jax.memory.residual`.
        mask: which leaves to compress, see :func:`gradcomp_jax.exchange`.

    Returns:
        A transformation of per-device gradients. Its update is their compressed mean, in their shapes and dtypes, equal on
        every worker.

    Raises:
        ValueError: for values out of range, for a block with ``exact``, and for a ``downlink_density`` without owners.
        TypeError: for a density that is traced.

    References:
        Stich et al., 2018, https://arxiv.org/abs/1809.07599, algorithm 1; Alistarh et al., 2018,
        https://arxiv.org/abs/1809.10505, section 2.
    """
    if exact and block is not None:
        raise ValueError(f"exact=True takes whole tensors as blocks, got block={block}; leave one of them out")
    if downlink_density is not None:
        refuse_without_downlink("downlink_density", collectives.as_collective(collective))
    options: dict[str, Any] = {"downlink_density": downlink_density, "dtype": dtype, "exact": exact}
    options |= {"bits": bits, "pack_positions": pack_positions}
    code: compressors.Compressor | Policy = compressors.topk(density, block=block, **options)
    if exact:
        code = by_tensor(lambda size: compressors.topk(density, block=size, **options), dense=compressors.dense())
    return averaged(
        code, axis_name=axis_name, memory=memory.residual(dtype=memory_dtype), collective=collective, mask=mask
    )
