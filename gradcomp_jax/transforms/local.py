"""A worker's own gradient before anything is accumulated or sent: clipped, decayed, and refused if it was reduced already."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _arguments, _checks, _compat
from gradcomp_jax import collectives as co
from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.core.context import context_of
from gradcomp_jax.core.refusals import refuse_beyond_float32

_UNIT = 2.0**-80  # any float32 times this has a square that is finite, summed over 2**31 entries too


@_arguments.checked
def local_clip(max_norm: Any, *, axis_name: AxisName | None) -> optax.GradientTransformationExtraArgs:
    r"""Clips each worker's whole gradient to the global norm :math:`thr\,N^{-1/2}`.

    The mean of N independent gradients has a norm of about :math:`N^{-1/2}` of one worker's. So clipping each of them to this
    norm bounds the mean by about thr.

    Example:
        >>> tx = optax.chain(gc.local_clip(1.0, axis_name="data"), gc.topk_sgd(axis_name="data"), optax.sgd(0.1))
        >>> state = gc.init_state(params, tx, mesh)

    Args:
        max_norm: thr, the norm that the averaged gradient may have.
        axis_name: the axis that the gradients are averaged over later; ``None`` for one worker.

    Returns:
        A transformation of per-device gradients, which goes before an exchange.

    Raises:
        ValueError: for a negative norm; when traced where no gradient is exchanged (:func:`gradcomp_jax.elastic_average`).

    References:
        Lin et al., 2018, https://arxiv.org/abs/1712.01887, section 3.2 (local gradient clipping).
    """
    _checks.at_least_zero("clip_norm", max_norm)

    def init(params: PyTree) -> optax.EmptyState:
        return optax.EmptyState()

    def update(updates: PyTree, state: optax.EmptyState, params: PyTree | None = None, **extra: Any) -> Any:
        context = context_of(extra)
        if context.not_gradients:
            raise ValueError(
                f"clip_norm is for gradients, and here it would see that of {context.not_gradients}; leave clip_norm out, and"
                " clip before that: gradcomp_jax.local_clip, or optax.clip_by_global_norm before the inner optimizer"
            )
        refuse_beyond_float32(updates)
        workers = _compat.axis_size(axis_name) or 1

        def square(unit: float) -> Any:
            parts = [jnp.sum(jnp.square(g.astype(jnp.float32) * unit)) for g in jax.tree.leaves(updates)]
            return sum(parts, jnp.zeros((), jnp.float32))

        # From 2**64 on a square overflows: then one more pass computes norm and bound in a larger unit.
        mine = square(1.0)
        large = jax.lax.cond(jnp.isfinite(mine), lambda: mine * _UNIT**2, lambda: square(_UNIT))
        # The norm is that of all the parts on a worker's devices.
        plain, scaled = co.psum([mine, large], context.inner_axis_name)
        fits = jnp.isfinite(plain)
        norm = jnp.sqrt(jnp.where(fits, plain, scaled))
        bound = jnp.asarray(max_norm, jnp.float32) * jnp.float32(workers**-0.5) * jnp.where(fits, 1.0, _UNIT)
        # A norm that is not finite would give zeros and NaNs. So the gradient stays as it is, and the exchange skips.
        factor = jnp.where(jnp.isfinite(norm) & (norm > bound), bound / norm, 1.0)
        return jax.tree.map(lambda g: (g.astype(jnp.float32) * factor).astype(g.dtype), updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def weight_decay(strength: Any) -> optax.GradientTransformation:
    r"""Wraps ``optax.add_decayed_weights``, with an error that says where else a decay can go.

    Args:
        strength: :math:`\lambda`.

    Raises:
        ValueError: when traced, without parameters.
    """
    plain = optax.add_decayed_weights(strength)

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        if params is None:
            raise ValueError(
                "weight_decay is added to a gradient and needs the parameters: call update(updates, state, params). Inside"
                " elastic_average, outer_average, local_sgd, diloco and rate_weighted what crosses is no gradient, and"
                " make_overlapped_step exchanges without parameters: leave weight_decay out, and give the decay to the inner"
                " optimizer, such as optax.adamw, or put optax.add_decayed_weights before it"
            )
        for (path, g), p in zip(jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(params), strict=False):
            if g.shape != p.shape:
                raise ValueError(
                    f"weight_decay is added to the gradient of {path_name(path)!r}, of shape {g.shape}, and here are shards of"
                    f" the parameters, {p.shape}: leave weight_decay out, and decay after the exchange, such as by optax.adamw"
                )
        # A gradient may be wider than its parameter: a shard's, or a weighted one.
        return plain.update(updates, state, jax.tree.map(_as_wide, params, updates))

    return optax.GradientTransformation(plain.init, update)


def _as_wide(param: Any, gradient: Any) -> Any:
    return param.astype(jnp.promote_types(param.dtype, gradient.dtype))


@_arguments.checked
def set_to_zero() -> optax.GradientTransformation:
    """Freezes parameters: ``optax.set_to_zero``, with zeros that count as equal on every worker.

    Optax makes its zeros from each worker's own gradient, and ``jax.shard_map`` with ``check_vma=True`` then takes the frozen
    parameters to differ by worker too. For ``optax.masked`` and ``optax.multi_transform``, beside an exchange of the others.

    Example:
        >>> exchange = optax.chain(gc.block_quantized(axis_name="data"), optax.sgd(0.1))
        >>> tx = optax.multi_transform({"train": exchange, "freeze": gc.set_to_zero()}, {"kernel": "train", "bias": "freeze"})
        >>> state = gc.init_state(params, tx, mesh)

    Returns:
        A transformation whose updates are zeros.
    """

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        # For a sharded parameter the gradient is whole, and the update is a shard.
        return jax.tree.map(
            lambda g, p: jnp.zeros(p.shape, g.dtype), updates, updates if params is None else params
        ), state

    return optax.GradientTransformation(optax.set_to_zero().init, update)
