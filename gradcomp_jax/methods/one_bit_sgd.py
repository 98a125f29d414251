"""1-bit SGD (Seide et al., 2014)."""

import functools
from typing import Any, Literal

import optax

from gradcomp_jax import _checks, collectives, compressors, memory
from gradcomp_jax._typing import AxisName
from gradcomp_jax.core import Mask, by_column
from gradcomp_jax.methods.registry import GATHERS, averaged, register


@register(kept="residual", momentum="after", collectives=GATHERS, paper="Interspeech 2014")
def one_bit_sgd(
    *,
    axis_name: AxisName | None,
    granularity: Literal["column", "block"] = "column",
    block: int | None = None,
    collective: collectives.Collective | str = "two_phase",
    memory_dtype: Any = "float32",
    mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Sends signs, and for each column of a weight matrix the mean of its positive and of its negative entries.

    :math:`x = g + e`; an entry is sent as its sign; it decodes to the mean of the column's entries of that sign;
    :math:`e \leftarrow x - D(C(x))`. Workers send to the columns' owners, which quantize the mean again and keep their
    own residual in the workers' memory: the double quantization of the paper, 1 bit in each direction.

    A column belongs to one output: all entries with one index in the last dimension. A column of zeros decodes to
    zeros. Momentum goes after it.

    Example:
        >>> tx = optax.chain(gc.one_bit_sgd(axis_name="data"), optax.sgd(0.1))
        >>> gc.planning.traffic.read(gc.one_bit_sgd, params, workers=8).sent  # bytes a worker sends in a step
        19719

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        granularity: means for each ``column``, as in the paper, or for each ``block`` of a tensor, which costs no
            transposition and suits tensors with short columns.
        block: entries of a block, with ``granularity="block"``; 512 by default.
        collective: see :func:`gradcomp_jax.exchange`.
        memory_dtype: what the residual is kept in, see :func:`gradcomp_jax.memory.residual`.
        mask: which leaves to compress, see :func:`gradcomp_jax.exchange`.

    Returns:
        A transformation of per-device gradients. Its update is their compressed mean, in their shapes and dtypes, equal on
        every worker.

    Raises:
        ValueError: for values out of range, and for a block with ``granularity="column"``.

    References:
        Seide et al., 2014, 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
        of Speech DNNs, Interspeech, sections 3.2 and 3.3.
    """
    _checks.one_of("granularity", granularity, ("column", "block"))
    by_columns = granularity == "column"
    if by_columns and block is not None:
        raise ValueError(
            f"granularity='column' takes whole columns as blocks, got block={block}; leave one of them out"
        )
    dense = compressors.dense()
    means = functools.partial(compressors.sign, "means")
    entries = 512 if block is None else block
    return averaged(
        by_column(lambda column: means(block=column), dense=dense) if by_columns else means(block=entries),
        axis_name=axis_name,
        memory=memory.residual(dtype=memory_dtype),
        collective=collective,
        mask=mask,
        view="columns" if by_columns else "rows",
        dense_compressor=dense,
    )
