"""One exchange for several batches."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _arguments, _checks, _compat, _registered
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.core.changed import of_state
from gradcomp_jax.core.refusals import refuse_beyond_float32
from gradcomp_jax.per_device import PerDevice, is_per_device
from gradcomp_jax.replicas.branching import advance
from gradcomp_jax.transforms import participation


@_registered.node
@dataclasses.dataclass(frozen=True)
class AccumulateState:
    """Holds the state of :func:`accumulate`.

    Attributes:
        batches: int32 scalar, number of batches in the sum.
        step: int32 scalar, updates of the inner transformation so far.
        total: this worker's sum of gradients times weights, ``PerDevice`` float32 ``[1, *shape]``.
        weight: this worker's sum of weights, ``PerDevice`` float32 ``[1]``; a batch without a weight counts as 1.
        inner: state of the inner transformation.
    """

    batches: Array
    step: Array
    total: PyTree
    weight: PerDevice
    inner: Any

    def staleness(self) -> Array:
        """Returns how many batches are in the sum and not yet in an update: int32 scalar."""
        return self.batches


@_arguments.checked
def accumulate(
    inner: optax.GradientTransformation, *, axis_name: AxisName | None, every: int | Callable[[Array], Array]
) -> optax.GradientTransformationExtraArgs:
    r"""Adds up each worker's gradients of several batches, and exchanges and updates once with their mean.

    It goes around a whole chain, exchange and optimizer: ``gc.accumulate(optax.chain(gc.dgc(...), optax.sgd(0.1)),
    axis_name="data", every=4)``. Between exchanges the update is zero, nothing is sent and no momentum decays
    (``optax.MultiSteps`` around an exchange would run the collective for every batch).

    With ``weight=`` (see :func:`gradcomp_jax.weighted`) each batch has its own weight. The mean is the weighted mean since the
    last exchange, a batch of weight 0 is not read, and the inner transformation is given the sum of the worker's weights.

    With a schedule the batch grows where the rate would otherwise decay: ``every=lambda step: 2 ** (step // 1000)``.

    State: :class:`AccumulateState`. Wire: the inner transformation's, once in ``every`` batches.

    Example:
        >>> chain = optax.chain(gc.block_quantized(axis_name="data"), optax.sgd(0.1))
        >>> tx = gc.accumulate(chain, axis_name="data", every=lambda step: 2 ** (step // 1000))
        >>> state = gc.init_state(params, tx, mesh)

    Args:
        inner: an exchange, usually with an optimizer after it.
        axis_name: the exchange's axis.
        every: batches for each update, or a function of the number of updates so far (int32 scalar) that returns it.

    Returns:
        A transformation of per-device gradients. Its update is that of ``inner`` in the last batch of a period, else zero.

    Raises:
        ValueError: for a number below 1; when traced, for sharded parameters.

    References:
        Smith et al., 2018, Don't Decay the Learning Rate, Increase the Batch Size, https://arxiv.org/abs/1711.00489.
    """
    if not callable(every):
        every = _checks.positive_int("every", every)
    exchange = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> AccumulateState:
        def nothing(shape: tuple[int, ...]) -> PerDevice:
            return PerDevice(_compat.varying(jnp.zeros((1, *shape), jnp.float32), axis_name), 1)

        # Two arrays, because one buffer cannot be donated twice.
        batches, step = (jnp.zeros((), jnp.int32) for _ in range(2))
        total = jax.tree.map(lambda p: nothing(jnp.shape(p)), params)
        return AccumulateState(batches, step, total, nothing(()), exchange.init(params))

    def update(
        updates: PyTree, state: AccumulateState, params: PyTree | None = None, *, weight: Any = None, **extra: Any
    ) -> Any:
        own = None if weight is None else participation.one_number(weight, axis_name)

        def add(mark: PerDevice, g: Array) -> PerDevice:
            if g.shape != mark.value.shape[1:]:
                raise ValueError(
                    f"a gradient has the shape {g.shape}, and the parameter {mark.value.shape[1:]}, a shard of it: where"
                    " parameters are sharded, accumulate by make_train_step(..., accumulate=...)"
                )
            g = g.astype(jnp.float32)
            g = g if own is None else jnp.where(own == 0, 0.0, g * own)
            return dataclasses.replace(mark, value=mark.value + g[None])

        refuse_beyond_float32(updates)
        total = jax.tree.map(add, state.total, updates, is_leaf=is_per_device)
        # An invalid weight makes the sum a NaN: the exchange is skipped.
        counts = 1.0 if own is None else jnp.where(own >= 0, own, jnp.nan)
        sums = dataclasses.replace(state.weight, value=state.weight.value + counts)
        batches = state.batches + 1

        def go(_: Any, inner_state: Any, total: PyTree, sums: PerDevice) -> tuple[PyTree, Any, PyTree, PerDevice]:
            by = jnp.where(sums.value[0] == 0, 1.0, sums.value[0])
            mean = jax.tree.map(lambda m: m.value[0] / by, total, is_leaf=is_per_device)
            # Cast, not clipped: what is beyond the range of the gradient's dtype must be detected.
            mean = jax.tree.map(lambda m, u: m.astype(u.dtype), mean, updates)
            given = extra if own is None else {**extra, "weight": sums.value[0]}
            moved, inner_state = exchange.update(mean, inner_state, params, **given)
            return moved, inner_state, *jax.tree.map(jnp.zeros_like, (total, sums))

        full = batches >= (every(state.step) if callable(every) else every)
        now = True if every == 1 else full
        still = _compat.zeros_of(go, None, state.inner, total, sums)[0]
        moved, inner_state, total, sums = advance(now, go, (still, state.inner, total, sums))
        # A schedule of batches sees the same count as optax's own schedules.
        step = jnp.where(now, optax.safe_increment(state.step), state.step)
        return moved, AccumulateState(jnp.where(now, 0, batches), step, total, sums, inner_state)

    return of_state(AccumulateState, init, update)
