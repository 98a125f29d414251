"""Outer steps as published: dense with Nesterov momentum, or sparse with error feedback instead."""

from typing import Any

import optax

from gradcomp_jax import _arguments
from gradcomp_jax._typing import AxisName
from gradcomp_jax.compressors import topk
from gradcomp_jax.core.exchange import exchange
from gradcomp_jax.memory import residual
from gradcomp_jax.replicas.fragments import Parts
from gradcomp_jax.replicas.outer import outer_average


@_arguments.checked
def diloco(
    method: optax.GradientTransformation,
    *,
    axis_name: AxisName | None,
    every: int = 100,
    learning_rate: Any = 0.7,
    momentum: float = 0.9,
    parts: Parts = 1,
    delay: int = 0,
    mix: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Makes :func:`outer_average` with an outer Nesterov momentum; goes after the inner optimizer, usually AdamW.

    Example:
        >>> method = gc.block_quantized(axis_name="data", bits=4)
        >>> tx = optax.chain(optax.adamw(1e-3), gc.diloco(method, axis_name="data", every=100))
        >>> state = gc.init_state(params, tx, mesh, replicas=True)
        >>> int(gc.staleness(state))  # before the first step
        0

    Args:
        method: an exchange of the outer gradients, such as ``gc.dense(...)`` or ``gc.block_quantized(..., bits=4)``.
        axis_name: the method's axis.
        every: inner steps from one outer step to the next.
        learning_rate: the outer learning rate; a schedule counts outer steps.
        momentum: the outer momentum.
        parts: parts of the tree, with outer steps at different times (streaming): their number, or
            :func:`gradcomp_jax.fragments`.
        delay: steps from a part's turn to the arrival of its mean, see :func:`outer_average`; the paper's streaming has 5.
        mix: a replica's own share in the parameters that it continues from when a mean arrives; the paper's streaming has 0.5.

    Returns:
        A transformation of the inner optimizer's updates. Its own are each replica's.

    Raises:
        ValueError: as for :func:`outer_average`.

    References:
        Douillard et al., 2023, https://arxiv.org/abs/2311.08105, algorithm 1 and section 3 (0.7 and 0.9); 2025,
        https://arxiv.org/abs/2501.18512 (parts).
    """
    outer = optax.sgd(learning_rate, momentum, nesterov=True)
    return outer_average(method, outer, axis_name=axis_name, every=every, parts=parts, delay=delay, mix=mix)


@_arguments.checked
def sparse_loco(
    *,
    axis_name: AxisName | None,
    every: int = 30,
    density: float = 1 / 64,
    chunk: int = 4096,
    decay: float = 0.95,
    learning_rate: Any = 1.0,
    parts: Parts = 1,
    delay: int = 0,
    mix: float = 0.0,
    collective: Any = "all_gather",
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes :func:`outer_average` of each chunk's largest entries, in two bits, with error feedback instead of momentum.

    It goes after the inner optimizer, usually AdamW. Small tensors cross whole. A chunk of 4096 entries is 84 bytes: 64
    for its 64 positions in order, 16 for their values, and two magnitudes in bfloat16.

    Example:
        >>> tx = optax.chain(optax.adamw(1e-3), gc.sparse_loco(axis_name="data", every=30))
        >>> state = gc.init_state(params, tx, mesh, replicas=True)
        >>> int(gc.staleness(state))  # before the first step
        0

    Args:
        axis_name: the axis.
        every: inner steps from one outer step to the next.
        density: fraction of each chunk that is sent.
        chunk: entries of a chunk, at most 65,536.
        decay: decay of the residual.
        learning_rate: the outer learning rate.
        parts: parts of the tree, with outer steps at different times: their number, or :func:`gradcomp_jax.fragments`.
        delay: steps from a part's turn to the arrival of its mean, see :func:`outer_average`.
        mix: a replica's own share in the parameters that it continues from when a mean arrives.
        collective: how payloads cross; the paper gathers them.
        mask: which leaves are sparse, see :func:`gradcomp_jax.exchange`.

    Returns:
        A transformation of the inner optimizer's updates. Its own are each replica's.

    Raises:
        ValueError: as for :func:`outer_average`.

    References:
        Sarfi et al., 2025, SparseLoCo, https://arxiv.org/abs/2508.15706, algorithm 1 and section 4; Covenant-72B, 2026,
        https://arxiv.org/abs/2603.08163 (12 bits a position).
    """
    method = exchange(
        topk(density, block=chunk, bits=2, pack_positions=True),
        axis_name=axis_name,
        memory=residual(decay=decay),
        collective=collective,
        mask=mask,
    )
    return outer_average(
        method, optax.sgd(learning_rate), axis_name=axis_name, every=every, parts=parts, delay=delay, mix=mix
    )
