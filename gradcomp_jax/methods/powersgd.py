"""PowerSGD (Vogels et al., 2019)."""

import functools

import optax

from gradcomp_jax import _checks, compressors, memory
from gradcomp_jax._typing import AxisName
from gradcomp_jax.transforms import Select, by_matrix, exchange


def powersgd(
    *,
    axis_name: AxisName | None,
    rank: int = 4,
    select: Select | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Low-rank averages of matrices, by two small all-reduces whatever the number of workers.

    For each matrix: :math:`M = g + e`; :math:`P = orth(mean(M Q))`; :math:`Q = mean(M^T P)`; the update is
    :math:`P Q^T`, and :math:`e \leftarrow M - P (M^T P)^T`. Q is kept, and is where the next step starts.

    The paper's residual is :math:`M - P Q^T` with the mean Q. Both give the same updates, because only the residuals'
    mean enters them; this one does not collect the workers' differences, which never cross.

    A tensor is a matrix of its last dimension against all others. Matrices of one shape are orthogonalized together. What
    would not shrink goes dense. Momentum goes after it.

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        rank: of the approximation; 1 to 4 in the paper.
        select: which leaves to compress; by default those with two or more dimensions that get smaller.
        seed: of the first Q.

    Raises:
        ValueError: for a rank below 1.

    References:
        Vogels et al., 2019, https://arxiv.org/abs/1905.13727, algorithms 1 and 2.
    """
    _checks.positive_int("rank", rank)
    dense = compressors.dense()
    code = functools.partial(compressors.low_rank, seed=seed)
    return exchange(
        by_matrix(lambda rows, columns: code(min(rank, rows, columns), (rows, columns)), dense=dense, select=select),
        axis_name=axis_name,
        memory=memory.residual(),
        dense_compressor=dense,
    )
