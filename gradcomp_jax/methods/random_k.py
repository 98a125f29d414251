"""Random-k (Stich et al., 2018)."""

from typing import Any

import optax

from gradcomp_jax import collectives, compressors
from gradcomp_jax._typing import AxisName
from gradcomp_jax.core import Mask
from gradcomp_jax.methods.registry import SELECTS, averaged, feedback, register


@register(
    kept="residual",
    momentum="after",
    collectives=SELECTS,
    paper="1809.07599",
    caution="the learning rate must be smaller than SGD's, or training may diverge",
    adam_b1=0.0,
)
def random_k(
    *,
    axis_name: AxisName | None,
    density: float = 0.01,
    block: int | None = None,
    error_feedback: bool = True,
    dtype: Any = "bfloat16",
    collective: collectives.Collective | str = "auto",
    memory_dtype: Any = "float32",
    mask: Mask | None = None,
    key: Any = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Sends entries chosen at random, the same ones on every worker, so that positions need not be sent.

    With error feedback: :math:`x = g + e`, sent: x at the step's positions, :math:`e \leftarrow x - sent`. Without error
    feedback it sends :math:`g / density` at those positions, which is unbiased and has :math:`1/density - 1` times the
    gradient's variance.

    In float32 it is one plain all-reduce of the chosen values. Momentum goes after it.

    Example:
        >>> tx = optax.chain(gc.random_k(axis_name="data", density=0.01), optax.sgd(0.01))
        >>> gc.planning.traffic.read(gc.random_k, params, workers=8).sent  # bytes a worker sends in a step
        4046

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        density: fraction of the entries to send.
        block: entries of which ``density`` are chosen; 1024 by default, longer for densities that need it.
        error_feedback: keeps what was not sent; otherwise what is sent is rescaled.
        dtype: dtype of values on the wire, bfloat16 or float32.
        collective: see :func:`gradcomp_jax.exchange`. By default the cheaper of ``all_gather`` and ``two_phase``.
        memory_dtype: what the residual is kept in, see :func:`gradcomp_jax.memory.residual`.
        mask: which leaves to compress, see :func:`gradcomp_jax.exchange`.
        key: seed (int) or typed JAX key of the positions.

    Returns:
        A transformation of per-device gradients. Its update is their compressed mean, in their shapes and dtypes, equal on
        every worker.

    Raises:
        ValueError: for values out of range, and for a ``memory_dtype`` without error feedback.
        TypeError: for a density that is traced.

    References:
        Stich et al., 2018, https://arxiv.org/abs/1809.07599, section 2.
    """
    code = compressors.random_k(density, block=block, rescale=not error_feedback, dtype=dtype)
    kept = feedback(error_feedback, memory_dtype)
    return averaged(code, axis_name=axis_name, memory=kept, collective=collective, mask=mask, key=key)
