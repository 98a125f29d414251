"""signSGD with majority vote (Bernstein et al., 2018)."""

from typing import Any

import optax

from gradcomp_jax import collectives, compressors, memory
from gradcomp_jax._typing import AxisName
from gradcomp_jax.methods.registry import GATHERS, averaged, register
from gradcomp_jax.transforms import Mask


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

    The update is :math:`sign(\sum_i sign(g^i))`, of leaves that stay dense the sign of the mean. It has no length: the
    learning rate decides it all, a tenth to a hundredth of SGD's or so.

    An entry that is exactly zero votes at random, and so does a tie; a block in which a worker has nothing but zeros does
    not vote. By gather, where votes are counted by everybody, a tie gives zero.

    Args:
        axis_name: the axis to average over, or ``None`` for one worker.
        block: entries that share the byte that says whether there is anything but zeros.
        collective: see :func:`gradcomp_jax.exchange`.
        mask: which leaves to compress, see :func:`gradcomp_jax.exchange`.
        key: seed (int) or typed JAX key of the votes of zeros and ties.

    Raises:
        ValueError: for values out of range.

    References:
        Bernstein et al., 2018, https://arxiv.org/abs/1802.04434, algorithm 1 and section 3.3; 2019,
        https://arxiv.org/abs/1810.05291 (majority vote).
    """
    code, kept = compressors.sign("unit", block=block), memory.none()
    voted = averaged(code, axis_name=axis_name, memory=kept, collective=collective, mask=mask, key=key)
    return optax.chain(voted, optax.scale_by_sign())
