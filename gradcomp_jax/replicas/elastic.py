"""Elastic averaging: replicas are pulled towards a common centre."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _arguments, _checks, _compat, _registered
from gradcomp_jax._counters import count_on
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.core.changed import only_of
from gradcomp_jax.core.context import with_context
from gradcomp_jax.replicas import nonfinite
from gradcomp_jax.replicas.branching import advance
from gradcomp_jax.transforms.participation import refuse_weight


@_registered.node
@dataclasses.dataclass(frozen=True)
class ElasticState(nonfinite.ReplicaState):
    """Holds the state of :func:`elastic_average`: a :class:`ReplicaState`, and the centre.

    Attributes:
        centre: the centre, float32, equal on every worker.
        method: state of the exchange.
    """

    centre: PyTree
    method: Any

    def staleness(self) -> Array:
        """Returns how many steps a replica has taken since the centre last pulled it: int32 scalar."""
        return jnp.where(self.step == 0, 0, (self.step - 1) % self.every + 1)


@_arguments.checked
def elastic_average(
    method: optax.GradientTransformation,
    *,
    axis_name: AxisName | None,
    every: int = 1,
    beta: float = 0.9,
    alpha: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Pulls every replica towards a common centre, and the centre towards the replicas (EASGD).

    Every ``every`` steps, with :math:`d_i = x_i - c` before the step and :math:`N` workers,

    .. math:: x_i \leftarrow x_i - \alpha d_i, \qquad c \leftarrow c + \beta \, \tfrac1N \sum_i d_i,

    in addition to the update of :math:`x_i` by the optimizer before it. With :math:`\alpha = \beta / N` (the default) what
    leaves the replicas enters the centre, so :math:`\sum_i x_i + c` is preserved. The :math:`d_i` cross by any exchange. What a
    method does not send now stays in its memory and reaches the centre later; with it, the sum that is preserved is
    :math:`\sum_i x_i + c + \beta \bar e`.

    It goes after the optimizer: ``optax.chain(optax.sgd(0.1), gc.elastic_average(gc.dense(axis_name="data"),
    axis_name="data", every=8))``; with ``optax.sgd(0.1, momentum=0.99, nesterov=True)`` it is EAMSGD.
    Evaluate ``gc.consolidate(state, of="centre")``.

    Replicas differ: build the state with ``gc.init_state(..., replicas=True)``. State: :class:`ElasticState`. Wire: the
    method's, every ``every`` steps. An update that is not finite is left out: the replica does not move.

    Example:
        >>> band = gc.elastic_average(gc.dense(axis_name="data"), axis_name="data", every=8)
        >>> tx = optax.chain(optax.sgd(0.1), band)
        >>> state = gc.init_state(params, tx, mesh, replicas=True)
        >>> gc.consolidate(state, of="centre")["kernel"].shape
        (256, 256)

    Args:
        method: an exchange, such as ``gc.dense(...)``.
        axis_name: the method's axis.
        every: the communication period :math:`\tau`.
        beta: how far the centre moves to the replicas' mean, in (0, 1].
        alpha: how far a replica moves to the centre; ``beta`` divided by the number of workers by default.

    Returns:
        A transformation of the optimizer's updates. Its own are each replica's.

    Raises:
        ValueError: for numbers out of range; when traced, without parameters, and for a method that decays weights or clips:
            what crosses is not a gradient.

    References:
        Zhang, Choromanska and LeCun, 2015, https://arxiv.org/abs/1412.6651, equations 5 and 6, algorithms 1 and 2.
    """
    every = _checks.positive_int("every", every)
    _checks.in_unit_interval("beta", beta)
    if alpha is not None:
        _checks.in_unit_interval("alpha", alpha)
    exchange = optax.with_extra_args_support(method)

    def init(params: PyTree) -> ElasticState:
        centre = _compat.invarying(nonfinite.or_zeros(params)[0], axis_name)
        zero = jnp.zeros((), jnp.int32)
        return ElasticState(
            zero, nonfinite.counter(axis_name), every, centre, exchange.init(_compat.invarying(params, axis_name))
        )

    def update(updates: PyTree, state: ElasticState, params: PyTree | None = None, **extra: Any) -> Any:
        nonfinite.need_replicas(params, axis_name, "elastic_average")
        refuse_weight(extra, "elastic_average", "what the centre gets is taken from the replicas, from each as much")
        band = beta / (_compat.axis_size(axis_name) or 1) if alpha is None else alpha
        own, ok = nonfinite.steady(updates, params)

        def pull(own: PyTree, centre: PyTree, inner: Any) -> tuple[PyTree, PyTree, Any]:
            apart = jax.tree.map(lambda p, c: p.astype(jnp.float32) - c, params, centre)
            mean, inner = exchange.update(
                apart, inner, None, **with_context(extra, not_gradients="elastic_average, a distance")
            )
            # It is subtracted from the replica now: what a compressor keeps is in the residual and reaches the centre later,
            # so nothing is counted twice.
            pulled = jax.tree.map(lambda u, d: u - band * d, own, apart)
            return pulled, jax.tree.map(lambda c, m: c + beta * m, centre, mean), inner

        now = True if every == 1 else state.step % every == 0
        own, centre, inner = advance(now, pull, (own, state.centre, state.method))
        new = ElasticState(count_on(state.step, cycle=every), nonfinite.count(state.dropped, ok), every, centre, inner)
        return nonfinite.like(own, updates), new

    return optax.GradientTransformationExtraArgs(init, only_of(ElasticState, update))
