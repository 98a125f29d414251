"""Dion (Ahn et al., 2025)."""

from typing import Any

import optax

from gradcomp_jax import _checks, compressors, memory
from gradcomp_jax._typing import AxisName
from gradcomp_jax.compressors.low_rank import highest_rank, low_rank_direction
from gradcomp_jax.core import Mask, Matrix, by_matrix
from gradcomp_jax.methods.registry import register
from gradcomp_jax.transforms import on_dense


@register(
    kept="residual",
    momentum="inside",
    collectives=("all_reduce",),
    paper="2504.05295",
    update="direction",
    caution="its updates are directions, at the learning rate of Muon",
    may_change=("momentum",),
)
def dion(
    *,
    axis_name: AxisName | None,
    rank: int = 16,
    momentum: float = 0.95,
    matrix: Matrix | None = None,
    others: optax.GradientTransformation | None = None,
    memory_dtype: Any = "float32",
    mask: Mask | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Makes an update like Muon's at low rank: each worker keeps a momentum, and only two thin factors of it cross.

    For each matrix, on worker i: :math:`B_i = M_i + g_i`; :math:`P = orth(mean(B_i Q))`; :math:`R_i = B_i^T P`;
    :math:`M_i \leftarrow B_i - (1 - \mu) P R_i^T`. With Q the columns of :math:`mean(R_i)` at length 1, where the next step
    starts, the update is :math:`\sqrt{columns / rows} \, P Q^T`. The mean of the :math:`M_i` is the momentum of one worker that
    sees the mean gradient.

    A kernel here is [in, out], so the factor is the paper's, the root of fan-out over fan-in. Tensors that go dense (vectors,
    those that ``mask`` leaves out, and matrices too small to gain at rank 1) get the update that ``others`` makes of their mean
    gradient: by default Lion's, as in the paper, which trains at the same learning rate. Chain a learning rate after it, and no
    other momentum.

    Example:
        >>> tx = optax.chain(gc.dion(axis_name="data", rank=16), optax.scale_by_learning_rate(0.01))
        >>> gc.planning.traffic.read(gc.dion, params, workers=8).sent  # bytes a worker sends in a step
        59143

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        rank: r. A matrix whose factors would not be smaller than itself has the highest rank at which they are.
        momentum: :math:`\mu`, in [0, 1): the part of what is sent that stays in the momentum.
        matrix: which dimensions number the matrices and which are rows, see :func:`gradcomp_jax.powersgd`.
        others: an optimizer without a learning rate, for tensors that go dense. ``optax.identity()`` returns mean gradients.
        memory_dtype: what the momentum is kept in, see :func:`gradcomp_jax.memory.residual`.
        mask: which leaves to compress, see :func:`gradcomp_jax.exchange`. The paper leaves out embeddings and the last layer.
        seed: seed of the first Q.

    Returns:
        A transformation of per-device gradients. Its update is a direction, in their shapes and dtypes, equal on every
        worker: a learning rate follows.

    Raises:
        ValueError: for a rank below 1, a momentum outside [0, 1), a pattern that is not a regular expression; when traced, for
            a split that leaves a tensor no columns.
        TypeError: for a momentum that is traced, and a split that is not a number or pair.

    References:
        Ahn et al., 2025, https://arxiv.org/abs/2504.05295, algorithm 1; Chen et al., 2023, Lion,
        https://arxiv.org/abs/2302.06675.
    """
    rank = _checks.positive_int("rank", rank)
    low_rank_direction(1, (1, 1), momentum=momentum)  # It refuses a bad momentum now, not when traced.

    def code(rows: int, columns: int) -> compressors.Compressor:
        r = min(rank, highest_rank((rows, columns)))
        return low_rank_direction(r, (rows, columns), momentum=momentum, seed=seed)

    return on_dense(
        by_matrix(code, dense=compressors.dense(), matrix=matrix),
        optax.scale_by_lion(0.9, 0.95) if others is None else others,
        axis_name=axis_name,
        memory=memory.residual(dtype=memory_dtype),
        mask=mask,
    )
