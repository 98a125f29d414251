"""Workers that are several devices: each device has its shard of every tensor, and of an exchange's state."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _compat, _registered, _specs, kernels
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.collectives import fused, wait
from gradcomp_jax.core.context import Context, context_of, with_context
from gradcomp_jax.core.made_by import MadeBy, made_by
from gradcomp_jax.core.shards import Shards
from gradcomp_jax.per_device import PerDevice, is_per_device

DIVISION = "shards"
"""The name of a division of tensors among devices, for checkpoints to compare."""


@_registered.node
@dataclasses.dataclass(frozen=True)
class ShardState:
    """Holds the state of an exchange of shards.

    Attributes:
        shard: the state of the exchange of each device's shard.
        made_by: how many devices share a tensor, and along which dimension each leaf is divided (None: in the order of its
            entries); static, for checkpoints to compare.
        axes: the name of the axis between workers, then that of the axis of a worker's devices; static.
    """

    shard: Any
    made_by: MadeBy = dataclasses.field(metadata={"static": True})
    axes: tuple[Any, ...] = dataclasses.field(metadata={"static": True})


def axes_of(axis_name: AxisName, option: str, inner_axis_name: AxisName) -> dict[str, Any]:
    """Returns both axes by the names of the options here; ``option`` is the user's name of the inner one.

    Raises:
        ValueError: if they are the same, or one is part of the other.
    """
    if set(_specs.names_of(axis_name)) & set(_specs.names_of(inner_axis_name)):
        both = f"{axis_name!r} for both" if axis_name == inner_axis_name else f"{axis_name!r} and {inner_axis_name!r}"
        raise ValueError(f"axis_name and {option} must differ, got {both}")
    return {"axis_name": axis_name, "inner_axis_name": inner_axis_name}


def init(
    inside: optax.GradientTransformation,
    params: PyTree,
    every: Sequence[Shards],
    axis_name: AxisName,
    inner_axis_name: AxisName,
    division: Mapping[str, Any] | None = None,
) -> ShardState:
    """Returns the state of an exchange of shards. Parameters that the user shards are given as shards already.

    ``division`` says how each leaf is divided, for checkpoints, where ``every`` does not say it.
    """
    leaves, treedef = jax.tree.flatten(params)
    shapes = [jnp.shape(p) if s.dim is not None else s.shape(jnp.shape(p)) for p, s in zip(leaves, every, strict=True)]
    zeros = jax.tree.unflatten(treedef, [jnp.zeros(shape, jnp.float32) for shape in shapes])
    devices = devices_along(inner_axis_name)
    state = jax.tree.map(lambda leaf: _mark(leaf, devices), inside.init(zeros), is_leaf=is_per_device)
    divided = made_by(DIVISION, division or {"devices": devices, "sharded_dims": [shards.dim for shards in every]})
    axes = (*_specs.names_of(axis_name), *_specs.names_of(inner_axis_name))
    return ShardState(_varying(state, axis_name, inner_axis_name), divided, axes)


def update(
    inside: optax.GradientTransformationExtraArgs,
    mine: Sequence[Array],
    every: Sequence[Shards],
    like: PyTree,
    state: ShardState,
    params: PyTree | None,
    *,
    axis_name: AxisName,
    inner_axis_name: AxisName,
    extra: Mapping[str, Any],
) -> tuple[PyTree, ShardState]:
    """Exchanges this device's shards, and gathers the updates of the tensors that the user's sharding leaves whole.

    ``mine`` are the shards, one of each leaf of the gradient tree ``like``, which has the shapes and dtypes of the updates.
    ``params`` are whole, or shards where they are sharded. The exchange is told that it sees a part of a worker's gradient.
    """
    leaves, treedef = jax.tree.flatten(like)
    devices = devices_along(inner_axis_name)
    before = jax.tree.map(lambda leaf: _unmark(leaf, devices, axis_name), state.shard, is_leaf=is_per_device)
    own_params = None
    if params is not None:
        own_params = jax.tree.unflatten(treedef, own(params, every, inner_axis_name))
    tree, context = jax.tree.unflatten(treedef, mine), context_of(extra)
    # A shard may be divided again: all axes within the worker count.
    within = (*_specs.names_of(context.inner_axis_name or ()), *_specs.names_of(inner_axis_name))
    moved, after = inside.update(tree, before, own_params, **with_context(extra, inner_axis_name=within))
    parts = jax.tree.leaves(moved)
    whole: list[Any] = [None] * len(parts)
    cut = [None if s.dim is not None else s.axes or inner_axis_name for s in every]
    for axes in dict.fromkeys(filter(None, cut)):
        came = in_buckets(fused.all_gather, parts, axes, context, where=[at == axes for at in cut])
        whole = [one if other is None else other for one, other in zip(came, whole, strict=True)]
    result = [
        kernels.narrowed(m if w is None else _join(w, g), g.dtype) for m, w, g in zip(parts, whole, leaves, strict=True)
    ]
    marked = jax.tree.map(_mark_again, state.shard, after, is_leaf=is_per_device)
    shard = _varying(marked, axis_name, inner_axis_name)
    return jax.tree.unflatten(treedef, result), dataclasses.replace(state, shard=shard)


def own(tree: PyTree, every: Sequence[Shards], inner_axis_name: AxisName) -> list[Array]:
    """Returns this device's shards of the leaves of a tree."""
    leaves = zip(jax.tree.leaves(tree), every, strict=True)
    return [s.own(x, _compat.axis_index(s.axes or inner_axis_name)) for x, s in leaves]


def in_buckets(
    collective: Callable[[list[Array], Any], list[Array]],
    arrays: Sequence[Array],
    axis_name: AxisName,
    context: Context,
    where: Sequence[bool] | None = None,
) -> list[Any]:
    """Runs one collective for each bucket of arrays, one array for each leaf; ``None`` where an array is left out."""
    result: list[Any] = [None] * len(arrays)
    came: list[Array] = []
    for bucket in context.buckets or [range(len(arrays))]:
        chosen = [i for i in bucket if where is None or where[i]]
        # The collectives run one after the other: a compiler would combine them into one.
        came = collective(wait([arrays[i] for i in chosen], came), axis_name) or came
        for i, value in zip(chosen, came if chosen else [], strict=True):
            result[i] = value
    return result


def shards_of(param_specs: PyTree | None, tree: PyTree, inner_axis_name: AxisName) -> list[Shards]:
    """Returns how every leaf is divided."""
    devices = devices_along(inner_axis_name)
    return [Shards(devices, _specs.sharded_dim(s, inner_axis_name)) for s in _specs.by_leaf(param_specs, tree)]


def devices_along(inner_axis_name: AxisName) -> int:
    """Returns how many devices make one worker.

    Raises:
        NameError: if the axis is not bound.
    """
    size = _compat.axis_size(inner_axis_name)
    if size is None:
        raise NameError(
            f"the axis {inner_axis_name!r} is not bound here: shards depend on its size; initialise and update inside"
            " jax.shard_map over both axes (gradcomp_jax.init_state and make_train_step do, with axis_name=(outer, inner))"
        )
    return size


def _join(stacked: Array, like: Array) -> Array:
    """Returns the tensor whose shards ``stacked`` holds."""
    return stacked.reshape(-1)[: like.size].reshape(like.shape)


def _mark(leaf: Any, devices: int) -> Any:
    """Marks what differs by device: everything but scalars, which all devices agree on."""
    if is_per_device(leaf):
        return dataclasses.replace(leaf, shards=leaf.shards * devices)
    if jnp.ndim(leaf) == 0:
        return leaf
    return PerDevice(leaf, leaf.shape[0], "replica", devices)


def _unmark(leaf: Any, devices: int, axis_name: AxisName) -> Any:
    """Removes the marks of what is equal on all workers, so that the exchange gets the state that it returned."""
    if not is_per_device(leaf):
        return leaf
    shards = leaf.shards // devices
    if leaf.kind == "replica" and shards == 1:
        return _compat.invarying(leaf.value, axis_name)
    return dataclasses.replace(leaf, shards=shards)


def _mark_again(mark: Any, leaf: Any) -> Any:
    value = leaf.value if is_per_device(leaf) else leaf
    return dataclasses.replace(mark, value=value) if is_per_device(mark) else value


def _varying(state: Any, *axes: AxisName) -> Any:
    """Casts per-device values to values that differ along both axes, where JAX tracks that."""

    def cast(leaf: Any) -> Any:
        if not is_per_device(leaf):
            return leaf
        value = leaf.value
        for axis in axes:
            value = _compat.varying(value, axis)
        return dataclasses.replace(leaf, value=value)

    return jax.tree.map(cast, state, is_leaf=is_per_device)
