"""A loss scale for float16 gradients, which grows until an exchange skips a step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _checks, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.per_device import nodes_of, nodes_within
from gradcomp_jax.transforms.exchange import ExchangeState
from gradcomp_jax.transforms.local import refuse_complex


class LossScaleState(NamedTuple):
    """State of :func:`dynamic_loss_scale`.

    Attributes:
        scale: float32 scalar, what the loss of the next step is multiplied by.
        good_steps: int32 scalar, steps since the scale last changed.
        inner: state of the inner transformation.
    """

    scale: Array
    good_steps: Array
    inner: Any


def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    *,
    initial: float = 2.0**15,
    growth_interval: int = 2000,
    factor: float = 2.0,
    minimum: float = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """Divides gradients by a loss scale, and moves it by what the exchanges skip.

    Around a whole chain: ``gc.dynamic_loss_scale(optax.chain(gc.dgc(...), optax.sgd(0.1)))``. :func:`make_train_step`
    multiplies the loss by the scale that it finds in the state; in a step of your own multiply it by
    :func:`gradcomp_jax.loss_scale`. Where a gradient overflows on any worker, the exchange skips the step on all of them, and
    the scale is divided by ``factor``; after ``growth_interval`` steps without that it is multiplied by it.

    State: :class:`LossScaleState`, equal on every worker. Wire: that of ``inner``. Gradients go on in float32.

    Args:
        inner: a chain with at least one exchange in it.
        initial: the first scale.
        growth_interval: steps without a skipped exchange after which the scale grows.
        factor: by which it grows and shrinks, above 1.
        minimum: the scale never falls below it.

    Raises:
        ValueError: for numbers out of range; by ``init``, if there is no exchange in ``inner``, or one of replicas that differ,
            such as :func:`gradcomp_jax.delayed_average`.

    References:
        Micikevicius et al., 2018, Mixed Precision Training, section 3.2, https://arxiv.org/abs/1710.03740.
    """
    _checks.above("initial", initial, 0)
    _checks.above("minimum", minimum, 0)
    _checks.above("factor", factor, 1)
    growth_interval = _checks.positive_int("growth_interval", growth_interval)
    update_with_extra = optax.with_extra_args_support(inner).update

    def init(params: PyTree) -> LossScaleState:
        state = inner.init(params)
        if not nodes_within(state, _is_exchange):
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
        refuse_complex(updates)
        updates = jax.tree.map(lambda g: _unscaled(g, state.scale), updates)
        moved, new = update_with_extra(updates, state.inner, params, **extra)
        good = skipped(new) == skipped(state.inner)
        steps = jnp.where(good, state.good_steps + 1, 0)
        grows = steps >= growth_interval
        smaller = jnp.maximum(state.scale / factor, minimum)
        scale = jnp.where(good, jnp.where(grows, state.scale * factor, state.scale), smaller)
        return moved, LossScaleState(scale, jnp.where(grows, 0, steps), new)

    return optax.GradientTransformationExtraArgs(init, update)


def loss_scale(state: Any) -> Array | None:
    """Returns the loss scale in a train state or an optimizer's: a float32 scalar, or ``None`` where there is none."""
    found = nodes_of(state, lambda node: isinstance(node, LossScaleState))
    return found[0].scale if found else None


def skipped(state: Any) -> Array:
    """Returns how many exchanges were skipped because a gradient was not finite, of all in a state: int32 scalar."""
    return sum((node.skipped for node in nodes_within(state, _is_exchange)), jnp.zeros((), jnp.int32))


def _is_exchange(node: object) -> bool:
    return isinstance(node, ExchangeState)


def _unscaled(gradient: Array, scale: Array) -> Array:
    if not jnp.issubdtype(gradient.dtype, jnp.floating):
        return gradient
    wide = kernels.widened(gradient)
    return wide / scale.astype(wide.dtype)
