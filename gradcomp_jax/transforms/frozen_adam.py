"""Adam whose variance freezes, so that its momentum can cross compressed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradcomp_jax import _checks, _compat, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.core.context import context_of, with_context
from gradcomp_jax.core.refusals import refuse_beyond_float32
from gradcomp_jax.transforms.skipping import keep_if, took_place

_LARGEST = 2.0**50


class FrozenAdamState(NamedTuple):
    """Holds the state of :func:`frozen_adam`.

    Attributes:
        taken: int32 scalar, steps taken, skipped ones not among them.
        mean: m, float32 in the parameters' shapes, equal on every worker.
        variance: v, likewise.
        dense: state of the exchange of gradients, in the first steps.
        compressed: state of the exchange of momenta.
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
    r"""Computes Adam's direction :math:`\hat m / (\sqrt{\hat v} + \epsilon)`, and exchanges only m once v is frozen.

    For the first ``warm_up_steps`` steps, gradients cross through ``dense`` and this is Adam. Then v stays fixed,
    and every worker sends :math:`\beta_1 m + (1 - \beta_1) g^i` through ``compressed``; the mean is the new m. Both are
    branches of one program, chosen by the replicated step count. Both are corrected for their start at zero.

    A code's error is alike for all entries of a block, and is divided by each entry's own :math:`\sqrt v`. Where that is much
    smaller than its neighbours', noise becomes the largest step of all, and training diverges. So the frozen
    :math:`\sqrt v` counts as at least ``floor`` times the root of the tensor's mean v. ``floor=0`` leaves it unchanged.

    An entry without a gradient in the whole warm-up takes its tensor's mean v. Where no entry of a tensor had one, as in a
    layer that is unfrozen later, it takes the mean of the whole tree (in a hierarchy, of the device's shards). No such entry
    has a step above 1.

    Squares are kept, so a magnitude above 2**50 counts as not finite and the exchange is skipped. A skipped exchange leaves
    m, v and all memories as they were, its update is zero, and it does not count as a step.

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
        extra = with_context(extra, dtypes=None)
        refuse_beyond_float32(updates)
        gradient = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        # An infinity replaces what has squares that overflow, alone or summed over a tensor.
        gradient = jax.tree.map(lambda g: jnp.where(jnp.abs(g) > _LARGEST, jnp.inf, g), gradient)

        # The gradient is closed over, so that an exchange sees where it comes from.
        def warming(state: FrozenAdamState) -> tuple[Array, FrozenAdamState]:
            mean, inner = dense.update(gradient, state.dense, params, **extra)
            ok = took_place(state.dense, inner)
            moved = _towards(state.mean, mean, b1)
            spread = _towards(state.variance, jax.tree.map(jnp.square, mean), b2)
            kept = (keep_if(ok, moved, state.mean), keep_if(ok, spread, state.variance))
            return ok, state._replace(mean=kept[0], variance=kept[1], dense=inner)

        def frozen(state: FrozenAdamState) -> tuple[Array, FrozenAdamState]:
            moved = _towards(state.mean, gradient, b1)
            mean, inner = compressed.update(moved, state.compressed, params, **extra)
            ok = took_place(state.compressed, inner)
            return ok, state._replace(mean=keep_if(ok, mean, state.mean), compressed=inner)

        branch = jnp.where(state.taken < steps, 0, 1)
        ok, new = jax.lax.switch(branch, (warming, frozen), state)
        taken = jnp.where(ok, optax.safe_increment(state.taken), state.taken)
        scale = (floor or 1.0) ** 2 * branch.astype(jnp.float32)
        for_mean = 1 - jnp.float32(b1) ** jnp.maximum(taken, 1).astype(jnp.float32)
        for_variance = 1 - jnp.float32(b2) ** jnp.clip(taken, 1, steps).astype(jnp.float32)

        def direction(mean: Array, variance: Array, least: Array, like: Array) -> Array:
            # Products, because XLA:TPU makes copies for a select.
            unseen = (variance <= 0).astype(jnp.float32)
            spread = jnp.maximum(variance, least if floor else least * unseen)
            root = jnp.sqrt(spread / for_variance) * (1 + unseen * (1 / (floor or 1.0) - 1))
            step = (mean / for_mean) / (root + jnp.float32(eps))
            step = step * (1 - unseen) + jnp.clip(step, -1.0, 1.0) * unseen
            # A sign code has no zero: where v is zero, its rounding error would be divided by epsilon.
            return kernels.narrowed(jnp.where(ok & (spread > 0), step, 0.0), like.dtype)

        result = jax.tree.map(direction, new.mean, new.variance, _means(new.variance, scale), updates)
        return result, new._replace(taken=taken)

    return optax.GradientTransformationExtraArgs(init, update)


def _towards(old: PyTree, new: PyTree, decay: float) -> PyTree:
    return jax.tree.map(lambda o, n: decay * o + (1 - decay) * n.astype(jnp.float32), old, new)


def _means(variance: PyTree, scale: Array) -> PyTree:
    """Returns the means of v by tensor, times ``scale``; for a tensor without one, the mean of the tree."""
    values, tree = jax.tree.flatten(variance)
    sums = [jnp.sum(v) for v in values]
    # Within a mesh some tensors may be sharded and others not, and the result must be equal on all devices.
    alike: dict[Any, list[int]] = {}
    for i, total in enumerate(sums):
        alike.setdefault(_compat.shape_like(total, (), jnp.float32), []).append(i)
    result = list(sums)
    for group in alike.values():
        totals = jnp.stack([sums[i] for i in group])
        sizes = np.array([max(values[i].size, 1) for i in group], np.float32)
        means = scale * jnp.where(totals > 0, totals / sizes, jnp.sum(totals) / np.sum(sizes))
        for place, i in enumerate(group):
            result[i] = means[place]
    return jax.tree.unflatten(tree, result)
