"""Gradients of each worker's own loss, inside a mapped axis or outside of it, of one batch or of several."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from gradcomp_jax import _arguments, _checks, _compat, _specs, _tracking, per_device
from gradcomp_jax._checks import is_typed_key
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.core.overwritten import is_overwritten, refuse_own_dtype
from gradcomp_jax.training import overwriting, refusals, seen
from gradcomp_jax.training.state import check_axis
from gradcomp_jax.transforms import participation


@_arguments.checked
def local_value_and_grad(
    loss: Callable[..., Any],
    *,
    axis_name: AxisName | None,
    has_aux: bool = False,
    aux: PyTree = "auto",
    accumulate: int = 1,
    weight: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
    by: Literal["shard_map", "vmap"] = "shard_map",
) -> Callable[..., tuple[Any, Any]]:
    """Returns a function like that of ``jax.value_and_grad``, for the gradient of this worker's loss alone.

    Inside ``jax.shard_map`` with ``check_vma=True``, ``jax.grad`` with respect to replicated parameters already sums over the
    axis, in a dense all-reduce. This casts the parameters to per-device values first; elsewhere it changes nothing. Integer
    leaves, which have no gradient, get zeros of their own dtype: keep them out of an exchange with
    ``optax.multi_transform`` and :func:`gradcomp_jax.set_to_zero`.

    With ``mesh`` the function is for plain ``jax.jit``, outside of the axis: it maps itself over the workers. Its gradients are
    :class:`PerDevice`, one a worker. They may be added up and scaled leaf by leaf, and go to :func:`gradcomp_jax.unreduced`.

    Example:
        >>> value, gradient = jax.jit(gc.local_value_and_grad(loss, axis_name=None))(params, batch)
        >>> gradient["kernel"].shape
        (256, 256)

    Args:
        loss: ``loss(params, *args, **kwargs) -> scalar``, the mean over the batch it sees; ``(scalar, aux)`` with ``has_aux``.
        axis_name: the axis that the workers lie along.
        has_aux: whether ``loss`` returns auxiliary output.
        aux: how ``aux`` is combined over micro-batches and, with ``mesh``, over workers: ``"mean"``, ``"sum"``, ``"max"`` or
            ``"examples"`` (one entry an example along the first dimension, joined in the order of the batch); or a tree of
            these, a prefix of ``aux``; or a function of ``aux`` that returns one. ``"auto"`` takes an array that grows with
            the batch for one entry an example, other floats for means, and signed integers for counts, which are added up.
            Without micro-batches and ``mesh``, ``aux`` is returned unchanged.
        accumulate: the number of micro-batches. The arrays in ``args`` are divided into them along their first dimension, which
            it must divide. They are processed in sequence, so activations are of one micro-batch at a time. Gradients and
            values are means over the micro-batches; gradients are accumulated in float32.
        weight: ``weight(*args) -> number``, what a micro-batch counts for, such as its number of examples that are not padding.
            The means over micro-batches, and those of ``mesh`` over workers, are weighted. A micro-batch of weight 0 is
            ignored; if all have weight 0, the gradient is zero and means are NaN. The sum over a worker's micro-batches is
            what ``update`` takes as ``weight=`` (:func:`gradcomp_jax.weighted`). ``"sum"`` and ``"max"`` leave out what has
            weight 0, ``"examples"`` leaves out nothing.
        mesh: the mesh of the workers, for use outside of the axis. Arrays in ``args``, the batch, are split over the workers;
            scalars, typed keys and ``kwargs`` go to all of them. The value is the workers' mean.
        by: how ``mesh`` maps the loss. ``"vmap"`` is for a loss with constraints on the mesh, such as
            ``jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, "tensor")))``, which JAX refuses in ``shard_map``.
            Arrays in the loss are one worker's, so constraints do not name its axis. All axes are of Auto type. The compiler
            gathers activations of convolutions under ``vmap``.

    The gradient of Flax's collection ``_overwrite_with_gradient``, the scales and histories of fp8, is its new values: the
    maximum over micro-batches and workers, equal on all workers, or the old value of a leaf if the maximum is not finite. If
    you add up several gradients, take the maximum for this collection too.

    Returns:
        A function with the arguments of ``loss`` that returns ``(value, gradient)``. Typed keys among its arguments are folded
        with the number of the micro-batch, and with ``mesh`` with the worker's, so that each draws different numbers. Means of
        floats have the dtype of the floats, means of integers float32; counts are int32 or wider. Examples are split along the
        axis: nothing is sent for them.

    Raises:
        ValueError: if ``accumulate`` is below 1, or the mesh has no such axis; when traced, if a batch cannot be divided, its
            arrays differ in length, the loss itself averages over the axis, a constraint names it, or the meaning of a leaf of
            ``aux`` is not clear: booleans, unsigned integers and keys, and arrays that grow along another dimension than the
            first.
    """
    found = worker_value_and_grad(
        loss, axis_name=axis_name, has_aux=has_aux, aux=aux, accumulate=accumulate, weight=weight
    )
    _checks.one_of("by", by, ("shard_map", "vmap"))
    if mesh is None:
        if by != "shard_map":
            raise ValueError(f"by={by!r} is for use outside of the axis: give the mesh too")

        def value_and_grad(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            own = found(params, *args, **kwargs)
            gradient = overwriting.heard(own.gradient, params, axis_name, weight=own.weight)
            return ((own.value, own.aux) if has_aux else own.value), gradient

        return value_and_grad
    if axis_name is None:
        raise ValueError("mesh= is for workers along an axis of it: give its axis_name too")
    return _outside(found, mesh, axis_name, has_aux, by)


class Found(NamedTuple):
    """Holds what a worker finds in its batch.

    Attributes:
        value: the loss, the weighted mean over its micro-batches.
        aux: the auxiliary output; ``None`` without.
        gradient: the gradient of its own loss.
        weight: the sum over its micro-batches, float32 scalar; ``None`` if all count the same.
        kinds: returns the kind of each leaf of ``aux``, in the order of ``jax.tree.leaves``.
    """

    value: Any
    aux: Any
    gradient: PyTree
    weight: Array | None
    kinds: Callable[[], list[str]]


def worker_value_and_grad(
    loss: Callable[..., Any],
    *,
    axis_name: AxisName | None,
    has_aux: bool,
    aux: PyTree,
    accumulate: int,
    weight: Callable[..., Any] | None,
) -> Callable[..., Found]:
    """Returns a function that finds, on one worker, all that :func:`local_value_and_grad` needs; it has the same arguments."""
    accumulate = _checks.positive_int("accumulate", accumulate)

    def one_number(*args: Any, **kwargs: Any) -> Any:
        returned = loss(*args, **kwargs)
        refusals.refuse_no_loss(returned, has_aux)
        return returned

    compute = jax.value_and_grad(one_number, has_aux=has_aux, allow_int=True)

    def with_zeros(params: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        value, gradient = compute(params, *args, **kwargs)
        return value, jax.tree.map(_zero_if_none, gradient, params)

    of_one = _tracking.unless_refused(with_zeros, axis_name)
    weight = weight and _tracking.unless_refused(weight, axis_name)

    def found(params: Any, *args: Any, **kwargs: Any) -> Found:
        refusals.refuse_no_arrays(params)
        refuse_own_dtype(params)
        local = _compat.varying(params, axis_name)

        def of_batch(args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
            value, gradient = of_one(local, args, kwargs)
            value, other = value if has_aux else (value, None)
            refusals.refuse_averaged(value, axis_name)
            # Zeros like the parameters as given are equal on all workers.
            return value, other, jax.tree.map(_zero_if_none, gradient, params)

        def weigh(args: Any) -> Array | None:
            return None if weight is None else participation.one_number(weight(*args), axis_name)

        def kinds_in(other: Any, args: Any, kwargs: Any) -> list[str]:
            sizes = [leaf.shape[0] for leaf in jax.tree.leaves(args) if _is_batch(leaf)]
            return seen.kinds_of(
                aux,
                other,
                lambda: _of_twice(lambda more: of_one(local, more, kwargs)[0][1], args),
                sizes[0] if sizes else None,
            )

        if accumulate > 1:
            return _over(of_batch, kinds_in, weigh, axis_name, accumulate, args, kwargs)
        value, other, gradient = of_batch(args, kwargs)
        return Found(value, other, gradient, weigh(args), lambda: kinds_in(other, args, kwargs))

    return found


def _zero_if_none(gradient: Any, param: Any) -> Any:
    """Returns a gradient as optax takes it, because JAX's gradient of an integer has a dtype that holds nothing."""
    return gradient if jnp.issubdtype(jnp.result_type(param), jnp.inexact) else jnp.zeros_like(param)


def _of_twice(function: Callable[[Any], Any], args: Any) -> Any:
    """Returns the shapes of what a function returns for a batch of twice the size; ``None`` if it takes no such batch."""
    try:
        twice = jax.tree.map(lambda x: jnp.concatenate([jnp.asarray(x)] * 2) if _is_batch(x) else x, args)
        return jax.eval_shape(lambda: function(twice))
    except Exception:
        # The model takes one size of batch only, and may raise any error for another.
        return None


def _over(
    of_batch: Callable[[Any, Any], Any],
    kinds_in: Callable[[Any, Any, Any], list[str]],
    weigh: Callable[[Any], Array | None],
    axis_name: AxisName | None,
    parts: int,
    args: Any,
    kwargs: Any,
) -> Found:
    """Returns what a function finds in its arguments' micro-batches, taken in sequence."""
    refusals.refuse_no_batch(args, _is_batch)
    leaves, treedef = jax.tree.flatten(args)
    divided = [_is_batch(leaf) for leaf in leaves]
    batches = [_divide(leaf, parts) for leaf, is_batch in zip(leaves, divided, strict=True) if is_batch]

    def part_of(number: Array, batches: list[Array]) -> Any:
        rest = iter(batches)
        mine = [next(rest) if is_batch else leaf for leaf, is_batch in zip(leaves, divided, strict=True)]
        return _fold_keys((jax.tree.unflatten(treedef, mine), kwargs), number)

    zeros = _compat.zeros_of(
        lambda number, batches: of_batch(*part_of(number, batches)), jnp.zeros((), jnp.int32), [b[0] for b in batches]
    )
    first = part_of(jnp.zeros((), jnp.int32), [b[0] for b in batches])
    found_kinds = kinds_in(zeros[1], *first)
    flat, structure = jax.tree.flatten(zeros)
    kinds = ["mean", *found_kinds, *overwriting.kinds_of(zeros[2])]
    summed = [number for number, kind in enumerate(kinds) if kind != "examples"]

    def add(totals: list[Array], part: Any) -> tuple[list[Array], Any]:
        own_args, own_kwargs = part_of(*part)
        values = jax.tree.leaves(of_batch(own_args, own_kwargs))
        own = weigh(own_args)
        if own is not None:
            values = [_compat.varying(x, axis_name) for x in values]
        new = [seen.added(kinds[n], total, values[n], own) for n, total in zip(summed, totals, strict=True)]
        return new, ([x for x, kind in zip(values, kinds, strict=True) if kind == "examples"], own)

    begin = [seen.begun(kinds[n], flat[n]) for n in summed]
    if weigh(first[0]) is not None:
        begin = [_compat.varying(x, axis_name) for x in begin]
    totals, (examples, weights) = lax.scan(add, begin, (jnp.arange(parts, dtype=jnp.int32), batches))
    # An invalid weight makes the sum NaN, so the exchange is skipped.
    weight = None if weights is None else jnp.where((weights >= 0).all(), weights.sum(), jnp.nan)
    results: list[Any] = [None] * len(flat)
    for n, total in zip(summed, totals, strict=True):
        empty = 0.0 if n > len(found_kinds) else jnp.nan
        results[n] = seen.ended(kinds[n], total, flat[n].dtype, parts, weight, empty)
    for n, joined in zip([n for n, kind in enumerate(kinds) if kind == "examples"], examples, strict=True):
        results[n] = joined.reshape(-1, *joined.shape[2:])
    value, other, gradient = jax.tree.unflatten(structure, results)
    return Found(value, other, gradient, weight, lambda: found_kinds)


def _divide(leaf: Any, parts: int) -> Array:
    leaf = jnp.asarray(leaf)
    if leaf.shape[0] % parts:
        raise ValueError(
            f"accumulate={parts} does not divide a worker's batch of {leaf.shape[0]}: choose a batch that is a multiple of"
            " workers times accumulate"
        )
    return leaf.reshape(parts, -1, *leaf.shape[1:])


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


def _outside(
    value_and_grad: Callable[..., Found], mesh: Mesh, axis_name: AxisName, has_aux: bool, by: str
) -> Callable[..., tuple[Any, Any]]:
    """Maps a worker's function over the workers, for use outside of the axis."""
    check_axis(mesh, axis_name)
    if by == "vmap":
        refusals.refuse_no_lanes(mesh, axis_name)
    everywhere, by_worker = PartitionSpec(), PartitionSpec(axis_name)

    def spec(path: Any, _: Any) -> PartitionSpec:
        return everywhere if is_overwritten(path) else by_worker

    def own_of_each(path: Any, gradient: Any) -> Any:
        return gradient if is_overwritten(path) else per_device.lift(gradient)

    def mapped(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        refusals.refuse_no_arrays(params)
        batch_specs = jax.tree.map(lambda leaf: by_worker if _is_batch(leaf) else everywhere, args)
        refusals.refuse_no_batch(args, _is_batch)
        if not any(map(_is_batch, jax.tree.leaves(args))):
            raise ValueError(
                "no positional argument is a batch, and all workers would compute the same: pass the batch by position, right"
                " after the parameters"
            )
        refusals.refuse_unplaced([leaf for leaf in jax.tree.leaves(args) if _is_batch(leaf)], mesh, axis_name)

        def one_worker(params: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
            args, kwargs = _fold_keys((args, kwargs), lax.axis_index(axis_name))
            found = value_and_grad(params, *args, **kwargs)
            if by == "vmap":
                refusals.refuse_averaged(found.value, axis_name, lanes=True)
            kinds = found.kinds() if has_aux else []
            share = None if found.weight is None else participation.share_of(found.weight, axis_name)
            value, other = seen.over_workers(["mean", *kinds], (found.value, found.aux), axis_name, share=share)
            numbers, examples = seen.parted(kinds, other)
            gradient = overwriting.heard(found.gradient, params, axis_name, weight=found.weight)
            return (value, numbers), examples, jax.tree_util.tree_map_with_path(own_of_each, gradient)

        out_specs = (everywhere, by_worker, jax.tree_util.tree_map_with_path(spec, params))
        mapping = _specs.vmapped if by == "vmap" else _specs.mapped
        step = mapping(one_worker, mesh, axis_name, (everywhere, batch_specs, everywhere), out_specs)
        with refusals.constraints_explained(axis_name):
            (value, numbers), examples, gradient = step(params, args, kwargs)
        return ((value, seen.together(numbers, examples)) if has_aux else value), gradient

    return mapped
