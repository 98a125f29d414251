"""Residuals in units of parameters: the learning rate is applied before the compression, as the papers have it.

The rate goes around the exchange and is not an argument of the memory. So it applies to momenta, owners' residuals and every
method alike, and a skipped step needs no rescaling.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _arguments, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.core.context import with_context
from gradcomp_jax.core.exchange import ExchangeState
from gradcomp_jax.core.placeholders import is_placeholder
from gradcomp_jax.core.refusals import refuse_beyond_float32
from gradcomp_jax.per_device import nodes_of
from gradcomp_jax.transforms.frozen_adam import FrozenAdamState
from gradcomp_jax.transforms.on_dense import OnDenseState
from gradcomp_jax.transforms.sums import RunningSumState


class RateWeightedState(NamedTuple):
    """Holds the state of :func:`rate_weighted`.

    Attributes:
        step: int32 scalar, updates seen, which the rate is a function of.
        inner: the method's state, whose memories are in units of rate times gradient.
    """

    step: Array
    inner: Any


@_arguments.checked
def rate_weighted(
    method: optax.GradientTransformation, rate: Callable[[Array], Any]
) -> optax.GradientTransformationExtraArgs:
    r"""Multiplies a method's gradients by the rate, and divides its updates by the rate.

    On worker :math:`i`, :math:`p = \eta_t g^i_t + e^i_t`, sent: :math:`C(p)`, :math:`e^i_{t+1} = p - D(C(p))`. The update is
    the mean of what was sent, divided by :math:`\eta_t`; an optimizer of the same rate multiplies it by :math:`\eta_t` again:
    ``optax.chain(gc.rate_weighted(gc.topk_sgd(...), schedule), optax.sgd(schedule))``. So the rest of an old gradient
    reaches the parameters with the rate of its own step. Without ``rate_weighted``, a residual is of gradients, and arrives
    with the rate of the step in which it is sent. The two differ where the rate changes, by :math:`\eta_{t-1} / \eta_t` in the
    residual.

    Law: :math:`\sum_t \eta_t u_t + \bar e_T = \sum_t \eta_t \bar g_t`, owners' residuals included in :math:`\bar e`.

    With momentum correction the velocity, too, is of rate times gradient. Momentum that follows sees updates divided by the
    present rate. A method's updates must grow with its gradients, so do not use this around a sign (a signed ``gc.demo`` takes
    ``rate``). In a step whose rate is not positive all workers skip the exchange: the update is zero, memories stay, and
    ``skipped`` goes up.

    The part of an update that is beyond float16's range is lost.

    State: :class:`RateWeightedState`. Wire: the method's. It takes one more copy of the gradient, in float32.

    Example:
        >>> schedule = optax.cosine_decay_schedule(0.1, decay_steps=1000)
        >>> method = gc.rate_weighted(gc.topk_sgd(axis_name="data", density=0.01), schedule)
        >>> tx = optax.chain(method, optax.sgd(schedule))
        >>> state = gc.init_state(params, tx, mesh)

    Args:
        method: an exchange with a memory.
        rate: a schedule, ``rate(step)``, of the number of updates so far (int32 scalar); give the optimizer the same one.

    Returns:
        A transformation of per-device gradients. Its update is the compressed mean, divided by the rate; an optimizer with
        the same rate follows.

    Raises:
        TypeError: for a rate that is not a function.
        ValueError: from ``init``, for a method without a memory, EF21 (whose estimate is compared with every new gradient),
            a signed DeMo, 1-bit Adam and Dion (whose updates do not grow with the gradient); when traced, for weight decay or
            clipping inside.

    References:
        Karimireddy et al., 2019, https://arxiv.org/abs/1901.09847, algorithm 2; Stich et al., 2018,
        https://arxiv.org/abs/1809.07599, algorithm 1; Zheng et al., 2019, https://arxiv.org/abs/1905.10936, algorithm 1.
    """
    if not callable(rate):
        raise TypeError(
            f"rate must be a function of the step, got {rate!r}: with a constant rate both forms are the same"
        )
    inside = optax.with_extra_args_support(method)

    def init(params: PyTree) -> RateWeightedState:
        # The method sees float32 leaves, so that the division comes before the rounding.
        inner = inside.init(jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params))
        if not is_placeholder(params):
            _check(inner)
        return RateWeightedState(jnp.zeros((), jnp.int32), inner)

    def update(updates: PyTree, state: RateWeightedState, params: PyTree | None = None, **extra: Any) -> Any:
        refuse_beyond_float32(updates)
        now = jnp.asarray(rate(state.step), jnp.float32)
        usable = now > 0
        # An update cannot be divided by a rate of zero. A NaN makes all workers skip instead.
        weight, unit = jnp.where(usable, now, jnp.nan), jnp.where(usable, now, 1.0)
        weighted = jax.tree.map(lambda g: g.astype(jnp.float32) * weight, updates)
        told = with_context(extra, not_gradients="rate_weighted, rate times gradient", dtypes=None)
        sent, inner = inside.update(weighted, state.inner, None, **told)

        def unweighted(sent: Array, like: Array) -> Array:
            # Divided by a small rate, an update may be beyond float32's range.
            return kernels.narrowed(jnp.clip(sent / unit, -kernels.LARGEST, kernels.LARGEST), like.dtype)

        result = jax.tree.map(unweighted, sent, updates)
        return result, RateWeightedState(optax.safe_increment(state.step), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _check(inner: Any) -> None:
    kinds = (ExchangeState, FrozenAdamState, OnDenseState, RunningSumState)
    found = nodes_of(inner, lambda s: isinstance(s, kinds))
    if any(isinstance(s, RunningSumState) for s in found):
        raise ValueError(
            "EF21 adds no errors up, its estimates are compared anew with every gradient: leave rate_weighted out"
        )
    if any(isinstance(s, FrozenAdamState) for s in found):
        raise ValueError(
            "Adam's updates do not grow with the gradient, so they cannot be divided by a rate: leave it out"
        )
    if any(isinstance(s, OnDenseState) for s in found):
        raise ValueError("Dion's updates are directions, which no rate can be divided from: leave it out")
    if any(("signed", "True") in s.made_by.options for s in found if isinstance(s, ExchangeState)):
        raise ValueError(
            "a sign does not grow with the gradient, so it cannot be divided by a rate: a signed gc.demo takes rate= itself"
        )
    if not any(jax.tree.leaves(s.memory) for s in found if isinstance(s, ExchangeState)):
        raise ValueError(
            "nothing stays behind in this method, and a rate would change nothing: leave rate_weighted out"
        )
