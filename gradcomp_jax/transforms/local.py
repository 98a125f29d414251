"""A worker's own gradient before anything is accumulated or sent: clipped, decayed, and refused if it was reduced already."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _arguments, _checks, _compat, _origins
from gradcomp_jax import collectives as co
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.transforms.context import context_of
from gradcomp_jax.transforms.policies import path_name

_UNIT = 2.0**-80  # any float32 times this has a square that is finite, summed over 2**31 entries too


@_arguments.checked
def local_clip(max_norm: Any, *, axis_name: AxisName | None) -> optax.GradientTransformationExtraArgs:
    r"""Clips each worker's whole gradient to the global norm :math:`thr\,N^{-1/2}`.

    The mean of N independent gradients has a norm of about :math:`N^{-1/2}` of one worker's. So clipping each of them to this
    norm bounds the mean by about thr.

    Args:
        max_norm: thr, the norm that the averaged gradient may have.
        axis_name: the axis that the gradients are averaged over later; ``None`` for one worker.

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
    """

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        # For a sharded parameter the gradient is whole, and the update is a shard.
        return jax.tree.map(
            lambda g, p: jnp.zeros(p.shape, g.dtype), updates, updates if params is None else params
        ), state

    return optax.GradientTransformation(optax.set_to_zero().init, update)


def refuse_beyond_float32(tree: PyTree, but: Iterable[int] = ()) -> None:
    """Refuses leaves that a cast to float32 would change: complex numbers, and floats of more digits and range.

    Args:
        tree: gradients, or parameters that are compared.
        but: numbers of leaves that pass through as they are.

    Raises:
        TypeError: naming the first such leaf.
    """
    passing = set(but)
    for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        dtype = jnp.result_type(leaf)
        if i in passing or not jnp.issubdtype(dtype, jnp.inexact):
            continue
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise TypeError(
                f"the gradient {path_name(path)!r} is {dtype}, and only real ones are taken here: put"
                " optax.contrib.split_real_and_imaginary around the whole chain"
            )
        if dtype.itemsize > 4:
            raise TypeError(
                f"the leaf {path_name(path)!r} is {dtype}, and what crosses and what is kept is float32: cast gradients first,"
                ' by jax.tree.map(lambda g: g.astype("float32"), gradient) or, as a link before this one,'
                ' optax.stateless(lambda g, _: jax.tree.map(lambda x: x.astype("float32"), g)), and parameters where'
                " replicas are compared; or keep the leaf out with optax.multi_transform and gradcomp_jax.set_to_zero()"
            )


def refuse_reduced(updates: PyTree, axis_name: AxisName | None, averaged: Iterable[int] = ()) -> None:
    """Refuses a gradient that does not vary over the axis: it was summed already, and nothing is left to compress.

    Where JAX does not track that, a gradient is refused if the traced equations show that it comes from a collective
    (``gradcomp_jax._origins``). Leaves whose numbers are in ``averaged`` are means on purpose.

    Raises:
        ValueError: naming the first such leaf.
    """
    expected = set(averaged)
    # An empty array has nothing to reduce, and a select of empty arrays is a constant; integers have no gradient.
    named = [
        (path, leaf)
        for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(updates))
        if i not in expected and jnp.size(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    ]
    if not _compat.tracks_varying(axis_name):
        _refuse_summed(named, axis_name)
        return
    for path, leaf in named:
        if not _compat.is_varying(leaf, axis_name):
            raise ValueError(
                f"the gradient {path_name(path)!r} is already reduced over {axis_name!r}. After another exchange in the chain"
                " it is the mean, and one exchange is enough: leave one out, or give each its own leaves with optax.masked."
                " Without another: inside jax.shard_map, jax.grad with respect to replicated parameters inserts a dense"
                " all-reduce of its own. Differentiate with gradcomp_jax.local_value_and_grad(loss,"
                f" axis_name={axis_name!r}), or cast the parameters first with jax.lax.pcast(params, {axis_name!r},"
                " to='varying'). optax.MultiSteps around an exchange reduces too: accumulate with gradcomp_jax.accumulate"
            )


def _refuse_summed(named: list[tuple[Any, Any]], axis_name: AxisName | None) -> None:
    """Refuses gradients that a collective has reduced before, as far as equations show it."""
    if axis_name is None or (_compat.axis_size(axis_name) or 1) == 1:
        return
    reduced = _origins.is_reduced([leaf for _, leaf in named], axis_name)
    # A vector beside other tensors goes dense anyway, and may not be a gradient but a count or a statistic of all workers.
    found = [
        path for (path, x), is_so in zip(named, reduced, strict=True) if is_so and (all(reduced) or jnp.ndim(x) > 1)
    ]
    if found:
        raise ValueError(
            f"the gradient {path_name(found[0])!r} is already reduced over {axis_name!r}: a pmean, psum or all_gather before"
            " the exchange has sent it densely, and nothing is left to compress. Leave that out: the exchange takes each"
            " worker's own gradient and returns the mean. A function that reduces by itself, such as one that takes"
            " pmap_axis_name, is given None for the name; after another exchange, one is enough"
        )
