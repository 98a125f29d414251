"""Adam whose variance freezes, so that its momentum can cross compressed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _checks, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.transforms.context import context_of
from gradcomp_jax.transforms.skipping import took_place

_LARGEST = 2.0**50


class FrozenAdamState(NamedTuple):
    """State of :func:`frozen_adam`.

    Attributes:
        taken: int32 scalar, steps taken, skipped ones not among them.
        mean: m, float32 in the parameters' shapes, equal on every worker.
        variance: v, likewise.
        dense: state of the exchange of the first steps.
        compressed: of the other's.
    """

    taken: Array
    mean: PyTree
    variance: PyTree
    dense: Any
    compressed: Any


def frozen_adam(
    dense: optax.GradientTransformationExtraArgs,
    compressed: optax.GradientTransformationExtraArgs,
    *,
    warm_up_steps: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    floor: float = 0.1,
) -> optax.GradientTransformationExtraArgs:
    r"""Adam's direction :math:`\hat m / (\sqrt{\hat v} + \epsilon)`, of which only m is exchanged once v is frozen.

    For the first ``warm_up_steps`` steps, gradients cross through ``dense`` and this is Adam. Then v stays what it is,
    and every worker sends :math:`\beta_1 m + (1 - \beta_1) g^i` through ``compressed``; the mean is the new m. Both are
    branches of one program, chosen by the replicated step count. Both are corrected for their start at zero.

    A code's error is alike for all entries of a block, and is divided by each one's own :math:`\sqrt v`: where that is much
    smaller than its neighbours', noise becomes the largest step of all, and training diverges. So the frozen
    :math:`\sqrt v` counts as at least ``floor`` times the root of the tensor's mean v. With ``floor=0`` it is as it is,
    but for entries that had no gradient in the whole warm-up: they do not move.

    Squares are kept, so a magnitude above 2**50 counts as not finite and the exchange is skipped. A skipped exchange leaves
    m, v and all memories as they were, its update is zero, and it is no step.

    Args:
        dense: the exchange of gradients.
        compressed: the exchange of momenta, with its memory.
        warm_up_steps: steps before v freezes, at least 1.
        b1: :math:`\beta_1`.
        b2: :math:`\beta_2`.
        eps: :math:`\epsilon`.
        floor: least frozen :math:`\sqrt v`, as a fraction of its root mean square over the tensor.

    Raises:
        ValueError: for fewer than one step of warm-up, and for decay rates outside [0, 1).
    """
    steps = _checks.positive_int("warm_up_steps", warm_up_steps)
    _checks.below_one("b1", b1)
    _checks.below_one("b2", b2)
    _checks.at_least_zero("floor", floor)

    def init(params: PyTree) -> FrozenAdamState:
        mean, variance = (jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params) for _ in range(2))
        zero = jnp.zeros((), jnp.int32)
        return FrozenAdamState(zero, mean, variance, dense.init(params), compressed.init(params))

    def update(updates: PyTree, state: FrozenAdamState, params: PyTree | None = None, **extra: Any) -> Any:
        if context_of(extra).describes:
            return compressed.update(updates, state.compressed, params, **extra)[0], state
        branch = jnp.where(state.taken < steps, 0, 1)

        # m and v are changed outside: of a result of a branch the compiler makes a copy.
        def warming(updates: PyTree, mean: PyTree, inner: tuple[Any, Any]) -> tuple[Array, PyTree, tuple[Any, Any]]:
            came, new = dense.update(jax.tree.map(_squarable, updates), inner[0], params, **extra)
            return took_place(inner[0], new), came, (new, inner[1])

        def frozen(updates: PyTree, mean: PyTree, inner: tuple[Any, Any]) -> tuple[Array, PyTree, tuple[Any, Any]]:
            sent = jax.tree.map(lambda m, g: _towards(m, _squarable(g), b1), mean, updates)
            came, new = compressed.update(sent, inner[1], params, **extra)
            return took_place(inner[1], new), came, (inner[0], new)

        operands = (updates, state.mean, (state.dense, state.compressed))
        ok, came, inner = jax.lax.switch(branch, (warming, frozen), *operands)
        warm = ok & (branch == 0)

        def next_mean(old: Array, came: Array) -> Array:
            came = came.astype(jnp.float32)
            return jnp.where(warm, _towards(old, came, b1), jnp.where(ok, came, old))

        def next_variance(old: Array, came: Array) -> Array:
            return jnp.where(warm, _towards(old, jnp.square(came), b2), old)

        mean = jax.tree.map(next_mean, state.mean, came)
        variance = jax.tree.map(next_variance, state.variance, came)
        taken = jnp.where(ok, optax.safe_increment(state.taken), state.taken)
        for_mean = 1 - jnp.float32(b1) ** jnp.maximum(taken, 1).astype(jnp.float32)
        for_variance = 1 - jnp.float32(b2) ** jnp.clip(taken, 1, steps).astype(jnp.float32)

        def direction(mean: Array, variance: Array, before: Array, like: Array) -> Array:
            # Once v is frozen it is what it was before, whose sum waits for nothing.
            least = jnp.where(branch == 1, jnp.float32(floor**2), 0.0) * jnp.sum(before) / max(before.size, 1)
            spread = jnp.maximum(variance, least)
            step = (mean / for_mean) / (jnp.sqrt(spread / for_variance) + jnp.float32(eps))
            # A sign has no zero: where v is, what comes of rounding would be divided by epsilon.
            return kernels.narrowed(jnp.where(ok & (spread > 0), step, 0.0), like.dtype)

        result = jax.tree.map(direction, mean, variance, state.variance, updates)
        return result, FrozenAdamState(taken, mean, variance, *inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _squarable(g: Array) -> Array:
    """A gradient in float32, with an infinity in the place of what has squares that overflow, alone or summed over a tensor."""
    g = g.astype(jnp.float32)
    return jnp.where(jnp.abs(g) > _LARGEST, jnp.inf, g)


def _towards(old: Array, new: Array, decay: float) -> Array:
    return decay * old + (1 - decay) * new.astype(jnp.float32)
