"""signSGD with majority vote (Bernstein et al., 2018)."""

from typing import Any

import optax

from gradcomp_jax import collectives, compressors, memory
from gradcomp_jax._typing import AxisName
from gradcomp_jax.core import Mask
from gradcomp_jax.methods.registry import GATHERS, averaged, register


@register(
    kept="nothing",
    momentum="after",
    collectives=GATHERS,
    paper="1802.04434",
    update="sign",
    caution="the learning rate alone decides how far a step goes: it must be about a tenth to a hundredth of SGD's",
)
def sign_sgd(
    *,
    axis_name: AxisName | None,
    block: int = 2048,
    collective: collectives.Collective | str = "two_phase",
    mask: Mask | None = None,
    key: Any = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Sends the signs of every worker's gradient, and the majority decides: 1 bit on the uplink and on the downlink.

    The update is :math:`sign(\sum_i sign(g^i))`; for leaves that go dense it is the sign of the mean. Its size does not depend
    on the gradient, so the learning rate alone sets the step: a tenth to a hundredth of SGD's or so.

    A worker's entry that is exactly zero votes at random. A worker whose block is all zeros does not vote in it. A tie is
    decided at random; with a gather, where every worker counts the votes, a tie gives zero.

    Example:
        >>> tx = optax.chain(gc.sign_sgd(axis_name="data"), optax.sgd(5e-4))
        >>> gc.planning.traffic.read(gc.sign_sgd, params, workers=8).sent  # bytes a worker sends in a step
        16191

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        block: entries that share the byte that says whether all of them are zero.
        collective: see :func:`gradcomp_jax.exchange`.
        mask: which leaves to compress, see :func:`gradcomp_jax.exchange`.
        key: seed (int) or typed JAX key of the votes of zeros and ties.

    Returns:
        A transformation of per-device gradients. Its update is -1, 0 or 1 in each entry, in their shapes and dtypes, equal
        on every worker.

    Raises:
        ValueError: for values out of range.

    References:
        Bernstein et al., 2018, https://arxiv.org/abs/1802.04434, algorithm 1 and section 3.3; 2019,
        https://arxiv.org/abs/1810.05291 (majority vote).
    """
    code, kept = compressors.sign("unit", block=block), memory.none()
    voted = averaged(code, axis_name=axis_name, memory=kept, collective=collective, mask=mask, key=key)
    return optax.chain(voted, optax.scale_by_sign())
