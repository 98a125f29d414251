"""A loss scale for float16 gradients, which grows until an exchange skips a step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradcomp_jax import _arguments, _checks, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.core.exchange import ExchangeState
from gradcomp_jax.core.placeholders import is_placeholder
from gradcomp_jax.core.refusals import refuse_beyond_float32
from gradcomp_jax.per_device import nodes_of, nodes_within

INITIAL = 2.0**15
"""The default of the first scale; it also replaces a scale that is not valid."""

_LEAST = float(np.finfo(np.float32).tiny)
_MOST_STEPS = 2**31 - 1


class LossScaleState(NamedTuple):
    """Holds the state of :func:`dynamic_loss_scale`.

    Attributes:
        scale: float32 scalar, the factor of the next step's loss.
        good_steps: int32 scalar, steps since the scale last changed.
        inner: state of the inner transformation.
    """

    scale: Array
    good_steps: Array
    inner: Any


@_arguments.checked
def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    *,
    initial: float = INITIAL,
    growth_interval: int = 2000,
    factor: float = 2.0,
    minimum: float = 1.0,
    maximum: float = 2.0**24,
) -> optax.GradientTransformationExtraArgs:
    """Divides gradients by a loss scale, and adjusts the scale when an exchange skips a step.

    It goes around a whole chain: ``gc.dynamic_loss_scale(optax.chain(gc.dgc(...), optax.sgd(0.1)))``. :func:`make_train_step`
    multiplies the loss by the scale that it finds in the state; in your own step multiply it by
    :func:`gradcomp_jax.loss_scale`. Where a gradient overflows on any worker, the exchange skips the step on all of them, and
    the scale is divided by ``factor``. After ``growth_interval`` steps without an overflow the scale is multiplied by
    ``factor``, up to ``maximum``. Gradients in bfloat16 or float32 overflow at no useful scale: without a bound the scale would
    become infinite.

    A scale in the state that is not finite, or not above 0, costs one skipped step and is ``initial`` after it.

    State: :class:`LossScaleState`, equal on every worker. Wire: that of ``inner``. Gradients are passed on in float32.

    Example:
        >>> tx = gc.dynamic_loss_scale(optax.chain(gc.dgc(axis_name="data"), optax.sgd(0.1)), initial=2.0**12)
        >>> float(gc.loss_scale(gc.init_state(params, tx, mesh)))
        4096.0

    Args:
        inner: a chain with at least one exchange.
        initial: the first scale.
        growth_interval: steps without a skipped exchange after which the scale grows.
        factor: the factor by which the scale grows and shrinks, above 1.
        minimum: the scale does not fall below it.
        maximum: the scale does not grow above it; one that begins above it stays there. With the default, float16 keeps some
            bits of gradients from 1e-11 on. A scale that has grown because no gradient overflowed takes one skipped step for
            each factor by which it falls again.

    Returns:
        A transformation of gradients of the scaled loss, with the updates of ``inner``.

    Raises:
        ValueError: for numbers out of range; by ``init``, if there is no exchange in ``inner``, or one of replicas that differ,
            such as :func:`gradcomp_jax.delayed_average`.

    References:
        Micikevicius et al., 2018, Mixed Precision Training, section 3.2, https://arxiv.org/abs/1710.03740.
    """
    for name, value in (("initial", initial), ("minimum", minimum), ("maximum", maximum)):
        _checks.above(name, value, 0)
        if not _LEAST <= value <= kernels.LARGEST:
            raise ValueError(f"{name} must be a normal, finite float32 number above 0, got {value!r}")
    if minimum > maximum:
        raise ValueError(f"minimum must be at most maximum={maximum}, got {minimum}")
    _checks.above("factor", factor, 1)
    if not np.float32(factor) > 1:
        raise ValueError(f"factor must be above 1 in float32 too, or the scale would stay where it is, got {factor!r}")
    growth_interval = min(_checks.positive_int("growth_interval", growth_interval), _MOST_STEPS)
    update_with_extra = optax.with_extra_args_support(inner).update

    def init(params: PyTree) -> LossScaleState:
        state = inner.init(params)
        there = not is_placeholder(params)
        if there and not nodes_within(state, _is_exchange):
            raise ValueError(
                "dynamic_loss_scale follows what an exchange skips, and there is none in its chain: put one such as"
                " gradcomp_jax.dense(axis_name=...) into it"
            )
        if nodes_within(state, lambda node: hasattr(node, "dropped")):
            raise ValueError(
                "dynamic_loss_scale follows what an exchange skips, and replicas leave out a gradient that is not finite before"
                " an exchange sees it, so the scale would never fall: train with bfloat16, which needs no scale, or scale the"
                " loss by a constant"
            )
        return LossScaleState(jnp.asarray(initial, jnp.float32), jnp.zeros((), jnp.int32), state)

    def update(
        updates: PyTree, state: LossScaleState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, LossScaleState]:
        refuse_beyond_float32(updates)
        # A loss that was multiplied by an invalid scale has no usable gradient: a NaN makes all workers skip.
        usable = is_scale(state.scale)
        divisor = jnp.where(usable, state.scale, jnp.nan)
        updates = jax.tree.map(lambda g: _unscaled(g, divisor), updates)
        moved, new = update_with_extra(updates, state.inner, params, **extra)
        good = skipped(new) == skipped(state.inner)
        steps = jnp.where(good, optax.safe_increment(state.good_steps), 0)
        grows = steps >= growth_interval
        larger = jnp.maximum(state.scale, jnp.minimum(state.scale * factor, maximum))
        smaller = jnp.minimum(state.scale, jnp.maximum(state.scale / factor, minimum))
        scale = jnp.where(good, jnp.where(grows, larger, state.scale), smaller)
        scale = jnp.where(usable, scale, jnp.float32(initial))
        return moved, LossScaleState(scale, jnp.where(grows, 0, steps), new)

    return optax.GradientTransformationExtraArgs(init, update)


@_arguments.checked
def loss_scale(state: Any) -> Array | None:
    """Returns the loss scale in a train state or an optimizer's: a float32 scalar, or ``None`` where there is none.

    Example:
        >>> tx = gc.dynamic_loss_scale(optax.chain(gc.dense(axis_name="data"), optax.sgd(0.1)))
        >>> float(gc.loss_scale(gc.init_state(params, tx, mesh)))
        32768.0

    Args:
        state: a train state, or an optimizer's.
    """
    found = nodes_of(state, lambda node: isinstance(node, LossScaleState))
    return found[0].scale if found else None


def skipped(state: Any) -> Array:
    """Returns how many exchanges in a state were skipped because a gradient was not finite: int32 scalar."""
    return sum((node.skipped for node in nodes_within(state, _is_exchange)), jnp.zeros((), jnp.int32))


def _is_exchange(node: object) -> bool:
    return isinstance(node, ExchangeState)


def is_scale(scale: Any) -> Any:
    """Returns whether a number is finite and above 0, and so can be a loss scale."""
    return (scale > 0) & (scale < jnp.inf)


def _unscaled(gradient: Array, scale: Array) -> Array:
    if not jnp.issubdtype(gradient.dtype, jnp.floating):
        return gradient
    wide = kernels.widened(gradient)
    return wide / scale.astype(wide.dtype)
