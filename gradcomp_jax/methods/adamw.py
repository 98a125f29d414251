"""AdamW after an exchange, with a first moment only where the method has none of its own."""

import math
from collections.abc import Callable
from typing import Any

import optax

from gradcomp_jax import _arguments, _checks, per_device
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.compressors.topk import MAX_BLOCK
from gradcomp_jax.core import ExchangeState
from gradcomp_jax.methods.every_method import topk_sgd
from gradcomp_jax.methods.registry import adam_b1

B1 = 0.9

ENTRIES = 10
"""Entries of each block that :func:`sparse_adamw` sends."""


@_arguments.checked
def adamw(
    learning_rate: optax.ScalarOrSchedule,
    exchange: optax.GradientTransformation,
    *,
    b1: float | None = None,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Any | Callable[[PyTree], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Chains an exchange and AdamW, and leaves out the first moment where the method already acts as one.

    After unbiased and fine codes it is plain AdamW, with :math:`\beta_1` = 0.9. The residual of a selection, of signs or of a
    low rank is a momentum already, like a velocity inside the method: an entry that waits arrives as the sum of all
    gradients since. Another momentum after it would spread that sum over as many steps again. So
    :math:`\beta_1` = 0 there, and no first moment is kept.

    State: ``(exchange's, Adam's, weight decay's, learning rate's)``, as that of ``optax.chain``.

    Example:
        >>> tx = gc.adamw(1e-3, gc.topk_sgd(axis_name="data", density=0.01))
        >>> state = gc.init_state(params, tx, mesh)
        >>> len(state.opt_state)  # of the exchange, Adam, the weight decay and the rate
        4

    Args:
        learning_rate: a number or a schedule.
        exchange: a method, :func:`gradcomp_jax.exchange`, or a chain that ends with one.
        b1: :math:`\beta_1`; by default as above.
        b2: :math:`\beta_2`.
        eps: :math:`\epsilon`.
        weight_decay: strength of the decoupled weight decay, times the learning rate.
        mask: which leaves decay, as ``optax.adamw`` takes it.

    Returns:
        A transformation of per-device gradients. Its update, in their shapes and dtypes, is equal on every worker and added
        to the parameters.

    Raises:
        ValueError: for decay rates outside [0, 1); in init, if ``exchange`` contains no exchange.

    References:
        Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101, algorithm 2.
    """
    if b1 is not None:
        _checks.below_one("b1", b1)
    _checks.below_one("b2", b2)
    exchange = optax.with_extra_args_support(exchange)

    def after(state: PyTree) -> optax.GradientTransformationExtraArgs:
        wanted = adam_b1(state)
        rate = (B1 if wanted is None else wanted) if b1 is None else b1
        # Adam without a first moment keeps no tree for it.
        adam = (
            optax.scale_by_adam(rate, b2, eps)
            if rate
            else optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True)
        )
        return optax.chain(
            adam, optax.add_decayed_weights(weight_decay, mask), optax.scale_by_learning_rate(learning_rate)
        )

    def init(params: PyTree) -> PyTree:
        state = exchange.init(params)
        if not per_device.nodes_of(state, lambda node: isinstance(node, ExchangeState)):
            raise ValueError(
                "exchange must be a method, gradcomp_jax.exchange(...) or a chain that ends with one, and has none"
            )
        return (state, *after(state).init(params))

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any) -> Any:
        updates, first = exchange.update(updates, state[0], params, **extra)
        updates, rest = after(state[0]).update(updates, state[1:], params, **extra)
        return updates, (first, *rest)

    return optax.GradientTransformationExtraArgs(init, update)


@_arguments.checked
def sparse_adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    axis_name: AxisName | None,
    density: float = 0.01,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Any | Callable[[PyTree], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Makes AdamW whose workers send only the largest entries, in two bits each, with nothing else to tune.

    In the exchange, a worker sends the largest entries of every block of each leaf, vectors too: about ten, each as a sign and
    one of two magnitudes, with positions in order. What is not sent waits in a residual. The owner of a block sends half as
    many entries again of the mean, and keeps the rest. :func:`adamw` follows, without a first moment, because the residual acts
    as one. The block follows from the density: 1,024 entries at 0.01.

    Example:
        >>> tx = gc.sparse_adamw(1e-3, axis_name="data", density=0.01)
        >>> sparse = functools.partial(gc.sparse_adamw, 1e-3)
        >>> gc.planning.traffic.read(sparse, params, workers=8).sent  # bytes a worker sends in a step
        2590

    Args:
        learning_rate: a number or a schedule; start with that of dense AdamW.
        axis_name: the axis to average over, or ``None`` for one worker.
        density: fraction of the entries that a worker sends; below 100 divided by the steps of the run it ends behind dense
            AdamW (docs/results/protocol.md).
        b2: as for :func:`adamw`.
        eps: likewise.
        weight_decay: likewise.
        mask: which leaves decay, as ``optax.adamw`` takes it.

    Returns:
        A transformation of per-device gradients. Its update, in their shapes and dtypes, is equal on every worker and added
        to the parameters.

    Raises:
        ValueError: for values out of range.
        TypeError: for a density that is traced.

    References:
        Stich et al., 2018, https://arxiv.org/abs/1809.07599, algorithm 1 (the residual); Sarfi et al., 2025,
        https://arxiv.org/abs/2508.15706, section 3 (two bits a value).
    """
    density = _checks.in_unit_interval("density", density)
    # With fewer entries scales cost more; more entries are beyond the fast selection.
    block = min(max(2 ** round(math.log2(ENTRIES / density)), 128), MAX_BLOCK)
    sent = topk_sgd(axis_name=axis_name, density=density, block=block, bits=2, pack_positions=True, mask=True)
    return adamw(learning_rate, sent, b2=b2, eps=eps, weight_decay=weight_decay, mask=mask)
