"""Deep Gradient Compression (Lin et al., 2018)."""

import dataclasses
from typing import Any, Literal

import optax

from gradcomp_jax import collectives, compressors, memory
from gradcomp_jax._typing import AxisName
from gradcomp_jax.core import Mask, by_tensor, exchange
from gradcomp_jax.core.masks import gains
from gradcomp_jax.methods.registry import SELECTS, refuse_without_downlink, register
from gradcomp_jax.transforms import Stages, local_clip, staged
from gradcomp_jax.transforms.local import weight_decay as decay


@register(
    kept="momentum",
    momentum="inside",
    collectives=SELECTS,
    paper="1712.01887",
    caution="give it a `warm_up` and a `clip_norm` where training starts with large, fast-changing gradients",
    may_change=("momentum", "clip_norm", "warm_up", "weight_decay"),
    adam_b1=0.0,
)
def dgc(
    *,
    axis_name: AxisName | None,
    density: float = 1e-3,
    momentum: Any = 0.9,
    nesterov: bool = False,
    weight_decay: Any = 0.0,
    clip_norm: Any = None,
    warm_up: Stages = (),
    momentum_correction: bool = True,
    masking: bool = True,
    block: int | None = None,
    downlink_density: float | None = None,
    dtype: Any = "bfloat16",
    bits: int | None = None,
    pack_positions: bool = False,
    view: Literal["tree"] | None = None,
    exact: bool = False,
    collective: collectives.Collective | str = "auto",
    memory_dtype: Any = "float32",
    mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Sends one entry in a thousand, after momentum, clipping and weight decay on the worker.

    Per worker and tensor: :math:`g \leftarrow g + \lambda w`; clip the whole gradient to :math:`thr\,N^{-1/2}`;
    :math:`u \leftarrow m u + g`, :math:`v \leftarrow v + u`; send the largest entries M of v;
    :math:`v \leftarrow v (1 - M)`, :math:`u \leftarrow u (1 - M)`. The update is the mean of what was sent.

    Chain plain ``optax.sgd(lr)`` after it: the momentum is inside the method. Leaves with fewer than two dimensions go dense,
    with the same momentum, and errors of rounding to ``dtype`` stay in v.

    Example:
        >>> tx = optax.chain(gc.dgc(axis_name="data", density=0.001, momentum=0.9), optax.sgd(0.1))
        >>> gc.planning.traffic.read(gc.dgc, params, workers=8).sent  # bytes a worker sends in a step
        1414

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        density: fraction of the entries to send.
        momentum: m, in [0, 1).
        nesterov: the look-ahead form of the momentum.
        weight_decay: :math:`\lambda`, added to the local gradient; ``update`` then needs ``params``.
        clip_norm: thr, of the averaged gradient; ``None`` does not clip.
        warm_up: ``((steps, density), ...)`` before the final density, see :func:`gradcomp_jax.warm_up`.
        momentum_correction: if false, it is plain error feedback, and the momentum follows the exchange, also a skipped one (an
            ablation).
        masking: momentum factor masking.
        block: entries among which the largest are chosen; 1024 by default, longer for densities that need it.
        downlink_density: fraction that the owners of a two-phase exchange send, and in a warm-up at least what a worker sends.
            By default half as many entries of a block again as a worker sends at the final density, rounded down. Where a
            worker sends one, as with the default density, a second one is 1.5 times the bytes. It is sent after a ``warm_up``,
            and without momentum correction, as by :func:`gradcomp_jax.topk_sgd`.
        dtype: dtype of values on the wire, also of the dense leaves: bfloat16 or float32.
        bits: 2 for a sign and one of two magnitudes for each value, see :func:`gradcomp_jax.compressors.topk`.
        pack_positions: sends positions in about two bits each and the logarithm of their distance.
        view: ``"tree"`` for blocks of all compressed leaves together, each a sample of the whole gradient.
        exact: the paper's selection, by sorting, as for :func:`gradcomp_jax.topk_sgd`.
        collective: see :func:`gradcomp_jax.exchange`. By default ``all_gather`` for two workers and ``two_phase`` for more. In
            two phases, a worker takes back, of an entry that its owner does not send, at most the smallest magnitude that the
            owner does send; the owner keeps the rest. The paper's form is ``all_gather``: the update has all that any worker
            sends.
        memory_dtype: what momentum and residual are kept in, see :func:`gradcomp_jax.memory.residual`.
        mask: which leaves to compress, see :func:`gradcomp_jax.exchange`; by default those with two or more dimensions.

    Returns:
        A transformation of per-device gradients. Its update is the compressed mean of their velocities, in their shapes and
        dtypes, equal on every worker.

    Raises:
        ValueError: for values out of range, for a block or a view with ``exact``, for a ``downlink_density`` without owners,
            and for ``masking=False`` without the momentum that it would mask.
        TypeError: for a density that is traced.

    References:
        Lin et al., 2018, Deep Gradient Compression, https://arxiv.org/abs/1712.01887.
    """
    kept = (
        memory.momentum_correction(momentum, nesterov=nesterov, masking=masking, dtype=memory_dtype)
        if momentum_correction
        else memory.residual(dtype=memory_dtype)
    )
    if not masking and not momentum_correction:
        raise ValueError(
            "masking=False is of the momentum inside, and momentum_correction=False has none: leave masking out"
        )
    for name, value in (("block", block), ("view", view)):
        if exact and value is not None:
            raise ValueError(f"exact=True takes whole tensors as blocks, got {name}={value}; leave one of them out")
    if downlink_density is not None:
        refuse_without_downlink("downlink_density", collectives.as_collective(collective))
    final = compressors.topk(density, block=block)
    # The final density decides in every stage: which leaves have a memory must not change between stages. Leaves that are
    # together need not fill a block each.
    judge = final if view is None else compressors.topk(density)
    chosen = gains(judge, compressors.dense(dtype)) if mask is None else mask
    if warm_up and downlink_density is None:
        downlink_density = final.k_downlink / final.block

    def send(at: float) -> optax.GradientTransformationExtraArgs:
        # The owners keep the surplus that workers send while their density is above the owners'.
        downlink = None if downlink_density is None else max(at, downlink_density)

        def largest(block: int) -> compressors.Compressor:
            code = compressors.topk(
                at,
                block=block,
                downlink_density=downlink,
                dtype=dtype,
                bits=bits,
                exact=exact,
                pack_positions=pack_positions,
            )
            # Owners send one entry where a worker does: accumulated entries come in turn, and a second adds half the bytes.
            one_for_one = momentum_correction and downlink is None and code.k == 1
            return dataclasses.replace(code, k_downlink=1) if one_for_one else code

        return exchange(
            by_tensor(largest, dense=compressors.dense(dtype)) if exact else largest(final.block),
            axis_name=axis_name,
            memory=kept,
            collective=collectives.as_collective(collective, lossy_downlink=True),
            mask=chosen,
            dense_compressor=compressors.dense(dtype),
            view=view,
        )

    before = [] if isinstance(weight_decay, (int, float)) and not weight_decay else [decay(weight_decay)]
    if clip_norm is not None:
        before.append(local_clip(clip_norm, axis_name=axis_name))
    after = [] if momentum_correction else [optax.trace(momentum, nesterov)]
    return optax.chain(*before, staged(send, warm_up, density, step_of=lambda state: state.step), *after)
