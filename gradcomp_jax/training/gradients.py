"""Gradients of each worker's own loss, inside a mapped axis and outside of it, of one batch or of several."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from gradcomp_jax import _checks, _compat, _specs, _tracking, kernels, per_device
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.training import refusals
from gradcomp_jax.training.state import check_axis
from gradcomp_jax.transforms.step_keys import is_typed_key


def local_value_and_grad(
    loss: Callable[..., Any],
    *,
    axis_name: AxisName | None,
    has_aux: bool = False,
    accumulate: int = 1,
    mesh: Mesh | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """Returns what ``jax.value_and_grad`` does, for the gradient of this worker's loss alone.

    Inside ``jax.shard_map`` with ``check_vma=True``, ``jax.grad`` with respect to replicated parameters already sums over the
    axis, in a dense all-reduce. This casts the parameters to per-device values first; elsewhere it changes nothing. Integer
    leaves, which have no gradient, get zeros of their own dtype: keep them out of an exchange with
    ``optax.multi_transform`` and :func:`gradcomp_jax.set_to_zero`.

    With ``mesh`` the function is for plain ``jax.jit``, outside of the axis: it maps itself over the workers. Its gradients are
    :class:`PerDevice`, one a worker, which may be added up and scaled leaf by leaf, and go to :func:`gradcomp_jax.unreduced`.

    Args:
        loss: ``loss(params, *args, **kwargs) -> scalar``, the mean over the batch it sees; ``(scalar, aux)`` with ``has_aux``.
        axis_name: the axis that the workers lie along.
        has_aux: whether ``loss`` returns auxiliary output.
        accumulate: micro-batches. The arrays in ``args`` are divided into so many along their first dimension, which it must
            divide, and are gone through one after the other: activations are of one micro-batch at a time. Gradients, values
            and ``aux`` are means over them, gradients in float32 until then.
        mesh: the mesh of the workers, for use outside of the axis. Arrays in ``args``, the batch, are split over the workers;
            scalars, typed keys and ``kwargs`` go to all of them. Value and ``aux`` are means over the workers.

    Returns:
        A function with the arguments of ``loss`` that returns ``(value, gradient)``. Typed keys among its arguments are folded
        with the number of the micro-batch, and with ``mesh`` with the worker's, so that each draws numbers of its own. Where
        ``aux`` is averaged, integers are rounded down.

    Raises:
        ValueError: if ``accumulate`` is below 1, or the mesh has no such axis; when traced, if a batch cannot be divided,
            what is divided is not all of one length, or the loss is averaged over the axis inside.
    """
    accumulate = _checks.positive_int("accumulate", accumulate)
    compute = jax.value_and_grad(loss, has_aux=has_aux, allow_int=True)

    def with_zeros(params: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        value, gradient = compute(params, *args, **kwargs)
        return value, jax.tree.map(_zero_if_none, gradient, params)

    own = _tracking.unless_refused(with_zeros, axis_name)

    def value_and_grad(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        local = _compat.varying(params, axis_name)

        def of_batch(args: Any, kwargs: Any) -> tuple[Any, Any]:
            value, gradient = own(local, args, kwargs)
            refusals.refuse_averaged(value[0] if has_aux else value, axis_name)
            # Of the parameters as they came: such zeros are equal on all workers.
            return value, jax.tree.map(_zero_if_none, gradient, params)

        return of_batch(args, kwargs) if accumulate == 1 else _mean_over(of_batch, accumulate, args, kwargs)

    if mesh is None:
        return value_and_grad
    if axis_name is None:
        raise ValueError("mesh= is for workers along an axis of it: give its axis_name too")
    return _outside(value_and_grad, mesh, axis_name)


def _zero_if_none(gradient: Any, param: Any) -> Any:
    """A gradient as optax takes it: JAX's of an integer is of a dtype that holds nothing."""
    return gradient if jnp.issubdtype(jnp.result_type(param), jnp.inexact) else jnp.zeros_like(param)


def _mean_over(of_batch: Callable[[Any, Any], Any], parts: int, args: Any, kwargs: Any) -> Any:
    """The mean of what a function returns over the micro-batches of its arguments."""
    refusals.refuse_no_batch(args, _is_batch)
    leaves, treedef = jax.tree.flatten(args)
    divided = [_is_batch(leaf) for leaf in leaves]
    batches = [_divide(leaf, parts) for leaf, is_batch in zip(leaves, divided, strict=True) if is_batch]

    def of_part(number: Array, batches: list[Array]) -> Any:
        rest = iter(batches)
        mine = [next(rest) if is_batch else leaf for leaf, is_batch in zip(leaves, divided, strict=True)]
        return of_batch(*_fold_keys((jax.tree.unflatten(treedef, mine), kwargs), number))

    first = [b[0] for b in batches]
    zeros = _compat.zeros_of(of_part, jnp.zeros((), jnp.int32), first)

    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(lambda t, x: t + _wide(x), total, of_part(*part)), None

    total, _ = lax.scan(add, jax.tree.map(_wide, zeros), (jnp.arange(parts, dtype=jnp.int32), batches))
    return jax.tree.map(lambda t, zero: _divided(t, parts, zero.dtype), total, zeros)


def _divide(leaf: Any, parts: int) -> Array:
    leaf = jnp.asarray(leaf)
    if leaf.shape[0] % parts:
        raise ValueError(
            f"accumulate={parts} does not divide a worker's batch of {leaf.shape[0]}: choose a batch that is a multiple of"
            " workers times accumulate"
        )
    return leaf.reshape(parts, -1, *leaf.shape[1:])


def _wide(x: Array) -> Array:
    """A summand as it is added up: narrow floats as float32, booleans as integers."""
    return x.astype(jnp.int32) if x.dtype == jnp.bool_ else kernels.widened(x)


def _divided(total: Array, count: int, dtype: Any) -> Array:
    """The mean in its own dtype, of integers rounded down."""
    inexact = jnp.issubdtype(total.dtype, jnp.inexact)
    return (total / count if inexact else total // count).astype(dtype)


def mean_of_workers(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Averages every leaf over the workers, narrow floats in float32, integers rounded down."""

    def mean(x: Any) -> Array:
        x = jnp.asarray(x)
        total = lax.psum(_compat.varying(_wide(x), axis_name), axis_name)
        return _divided(total, lax.axis_size(axis_name), x.dtype)

    return jax.tree.map(mean, tree)


def _is_batch(leaf: Any) -> bool:
    return jnp.ndim(leaf) > 0 and not is_typed_key(leaf)


def _fold_keys(tree: PyTree, number: Array) -> PyTree:
    def fold(leaf: Any) -> Any:
        if not is_typed_key(leaf):
            return leaf
        fold_all = jax.random.fold_in
        for _ in range(leaf.ndim):
            fold_all = jax.vmap(fold_all, in_axes=(0, None))
        return fold_all(leaf, number)

    return jax.tree.map(fold, tree)


def _outside(value_and_grad: Callable[..., Any], mesh: Mesh, axis_name: AxisName) -> Callable[..., tuple[Any, Any]]:
    """A worker's function for use outside of the axis."""
    check_axis(mesh, axis_name)
    everywhere, by_worker = PartitionSpec(), PartitionSpec(axis_name)

    def mapped(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        batch_specs = jax.tree.map(lambda leaf: by_worker if _is_batch(leaf) else everywhere, args)
        refusals.refuse_no_batch(args, _is_batch)
        if not any(map(_is_batch, jax.tree.leaves(args))):
            raise ValueError(
                "no positional argument is a batch, and all workers would compute the same: pass the batch by position, right"
                " after the parameters"
            )
        refusals.refuse_unplaced([leaf for leaf in jax.tree.leaves(args) if _is_batch(leaf)], mesh, axis_name)

        def one_worker(params: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
            args, kwargs = _fold_keys((args, kwargs), lax.axis_index(axis_name))
            value, gradient = value_and_grad(params, *args, **kwargs)
            return mean_of_workers(value, axis_name), per_device.lift(gradient)

        return jax.shard_map(
            one_worker,
            mesh=mesh,
            axis_names=set(_specs.names_of(axis_name)),
            in_specs=(everywhere, batch_specs, everywhere),
            out_specs=(everywhere, by_worker),
        )(params, args, kwargs)

    return mapped
