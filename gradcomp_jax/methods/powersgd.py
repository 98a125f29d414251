"""PowerSGD (Vogels et al., 2019)."""

import functools
from typing import Any

import optax

from gradcomp_jax import _checks, compressors, memory
from gradcomp_jax._typing import AxisName
from gradcomp_jax.core import Mask, Matrix, by_matrix, exchange
from gradcomp_jax.methods.registry import register
from gradcomp_jax.transforms import plus_trace


@register(
    kept="residual",
    momentum="after",
    collectives=("all_reduce",),
    paper="1905.13727",
    adam_b1=0.0,
    may_change=("momentum",),
)
def powersgd(
    *,
    axis_name: AxisName | None,
    rank: int = 4,
    matrix: Matrix | None = None,
    momentum: Any = None,
    memory_dtype: Any = "float32",
    mask: Mask | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages matrices at low rank, by two small all-reduces for any number of workers.

    For each matrix: :math:`M = g + e`; :math:`P = orth(mean(M Q))`; :math:`Q = mean(M^T P)`; the update is
    :math:`P Q^T`, and :math:`e \leftarrow M - P (M^T P)^T`. Q is kept, and the next step starts from it.

    The paper's residual is :math:`M - P Q^T` with the mean Q. Both give the same updates, because only the residuals'
    mean enters them; this one does not collect the workers' differences, which never cross.

    By default a tensor is one matrix, whose rows are the leading dimensions that make rows + columns fewest. A
    convolution kernel [height, width, in, out] has height x width x in rows, as in the paper; an attention kernel [embed,
    heads, head_dim] has embed rows and heads x head_dim columns; one of [heads, head_dim, embed] has embed columns. Stacked
    layers, [layers, in, out], must be distinguished from those by name. ``matrix={"layers/": 1}`` says that one
    leading dimension numbers the matrices in every tensor whose path has ``layers/`` in it: each matrix has its own P and Q.
    ``{"attention/out": (1, 2)}`` says in addition that the two dimensions after it are the rows. Matrices of one
    shape are orthogonalized together. Tensors that would not get smaller go dense.

    With ``momentum`` :math:`\lambda` the update is :math:`P Q^T + m` with :math:`m \leftarrow \lambda m + P Q^T`, the
    momentum of the paper's algorithm 2. Like an optimizer's momentum it continues where an exchange is skipped. Chain plain
    SGD after it. Without ``momentum``, any momentum or Adam goes after it.

    Example:
        >>> tx = optax.chain(gc.powersgd(axis_name="data", rank=4), optax.sgd(0.1))
        >>> gc.planning.traffic.read(gc.powersgd, params, workers=8).sent  # bytes a worker sends in a step
        16135

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        rank: rank of the approximation; 1 to 4 in the paper.
        matrix: which dimensions number the matrices and which are rows, where the default is not right. Maps patterns to
            ``batch`` or ``(batch, rows)``, numbers of dimensions. Patterns are searched for in a tensor's path as by
            :func:`gradcomp_jax.by_path`; the first pattern found counts. Or a function ``matrix(path, leaf)`` that returns one
            of those or ``None``, the default. With ``batch`` alone the other dimensions are split as by default; vectors go
            dense.
        momentum: :math:`\lambda`, in [0, 1); ``None`` for no momentum.
        memory_dtype: what the residual is kept in, see :func:`gradcomp_jax.memory.residual`.
        mask: which leaves to compress, see :func:`gradcomp_jax.exchange`.
        seed: seed of the first Q.

    Returns:
        A transformation of per-device gradients. Its update is their compressed mean, in their shapes and dtypes, equal on
        every worker.

    Raises:
        ValueError: for a rank below 1, a momentum outside [0, 1), a pattern that is not a regular expression; when traced, for
            a split that leaves a tensor no columns.
        TypeError: for a split that is not a number or pair.

    References:
        Vogels et al., 2019, https://arxiv.org/abs/1905.13727, algorithms 1 and 2.
    """
    rank = _checks.positive_int("rank", rank)
    dense = compressors.dense()
    code = functools.partial(compressors.low_rank, seed=seed)
    policy = by_matrix(
        lambda rows, columns: code(min(rank, rows, columns), (rows, columns)), dense=dense, matrix=matrix
    )
    averaged = exchange(
        policy, axis_name=axis_name, memory=memory.residual(dtype=memory_dtype), mask=mask, dense_compressor=dense
    )
    return averaged if momentum is None else optax.chain(averaged, plus_trace(momentum))
