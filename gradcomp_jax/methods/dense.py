"""Dense averaging: the baselines."""

from typing import Any

import optax

from gradcomp_jax import collectives, compressors, memory
from gradcomp_jax._typing import AxisName
from gradcomp_jax.methods.registry import GATHERS, averaged, register


@register(
    kept="nothing",
    momentum="after",
    collectives=(*GATHERS, "all_reduce"),
    paper="",
    biased=False,
    name="dense_bf16",
    dtype="bfloat16",
)
@register(kept="nothing", momentum="after", collectives=("all_reduce", *GATHERS), paper="", biased=False)
def dense(
    *, axis_name: AxisName | None, dtype: Any = "float32", collective: collectives.Collective | str = "auto"
) -> optax.GradientTransformationExtraArgs:
    """Averages the gradients, in float32 or moved as bfloat16.

    float32 is one all-reduce. bfloat16 crosses in two phases: 16-bit words go to their owners, which sum in float32 and send
    the mean back in 16 bits. That moves as many bytes as a bfloat16 all-reduce, also on backends that would widen one to
    float32 (the CPU's), and sums more exactly. ``collective="all_reduce"`` uses the backend's own all-reduce.

    Example:
        >>> tx = optax.chain(gc.dense(axis_name="data"), optax.sgd(0.1))
        >>> gc.planning.traffic.read(gc.dense, params, workers=8).sent  # bytes a worker sends in a step
        460551

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        dtype: float32 or bfloat16.
        collective: see :func:`gradcomp_jax.exchange`.

    Returns:
        A transformation of per-device gradients. Its update is their mean, in their shapes and dtypes, equal on every
        worker.

    Raises:
        ValueError: for an unknown dtype.
    """
    code = compressors.dense(dtype)
    return averaged(code, axis_name=axis_name, memory=memory.none(), collective=collective, mask=True)
