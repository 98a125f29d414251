"""A worker that is several devices: each has its share of every tensor, and of an exchange's state."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _compat, _specs
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.collectives import fused
from gradcomp_jax.per_device import PerDevice, is_per_device
from gradcomp_jax.transforms.cut import Cut
from gradcomp_jax.transforms.exchange import INNER_AXIS, in_buckets, inner_axis


class ShareState(NamedTuple):
    """Attributes: ``share``, the state of the exchange of each device's share."""

    share: Any


def init(
    inside: optax.GradientTransformation,
    params: PyTree,
    cuts: Sequence[Cut],
    axis_name: AxisName,
    inner_axis_name: AxisName,
) -> ShareState:
    """State of the exchange of the shares of parameters, of which the sharded ones are shards already."""
    leaves, treedef = jax.tree.flatten(params)
    shapes = [jnp.shape(p) if c.dim is not None else c.shape(jnp.shape(p)) for p, c in zip(leaves, cuts, strict=True)]
    zeros = jax.tree.unflatten(treedef, [jnp.zeros(shape, jnp.float32) for shape in shapes])
    devices = devices_along(inner_axis_name)
    state = jax.tree.map(lambda leaf: _mark(leaf, devices), inside.init(zeros), is_leaf=is_per_device)
    return ShareState(_varying(state, axis_name, inner_axis_name))


def update(
    inside: optax.GradientTransformationExtraArgs,
    shares: Sequence[Array],
    cuts: Sequence[Cut],
    like: PyTree,
    state: ShareState,
    params: PyTree | None,
    *,
    axis_name: AxisName,
    inner_axis_name: AxisName,
    extra: Mapping[str, Any],
) -> tuple[PyTree, ShareState]:
    """Exchanges this device's shares, and gathers the updates of what no sharding divides.

    Args:
        inside: the exchange, which is told that it sees a part of a worker's gradient.
        shares: this device's, a leaf of ``like`` each.
        cuts: of every leaf.
        like: the gradient tree, for shapes and dtypes of the updates.
        state: of :func:`init`.
        params: whole, or shards of what is sharded.
        axis_name: the axis between workers.
        inner_axis_name: the axis within a worker.
        extra: for the exchange.
    """
    leaves, treedef = jax.tree.flatten(like)
    index = _compat.axis_index(inner_axis_name)
    devices = devices_along(inner_axis_name)
    before = jax.tree.map(lambda leaf: _unmark(leaf, devices, axis_name), state.share, is_leaf=is_per_device)
    mine = None
    if params is not None:
        mine = jax.tree.unflatten(
            treedef, [c.own(p, index) for p, c in zip(jax.tree.leaves(params), cuts, strict=True)]
        )
    tree = jax.tree.unflatten(treedef, shares)
    # A share may be cut into shares once more: all axes within the worker count.
    within = (*_specs.names_of(inner_axis(extra) or ()), *_specs.names_of(inner_axis_name))
    moved, after = inside.update(tree, before, mine, **{**extra, INNER_AXIS: within})
    parts = jax.tree.leaves(moved)
    whole = in_buckets(fused.all_gather, parts, inner_axis_name, extra, where=[c.dim is None for c in cuts])
    result = [(m if w is None else _join(w, g)).astype(g.dtype) for m, w, g in zip(parts, whole, leaves, strict=True)]
    marked = jax.tree.map(_mark_again, state.share, after, is_leaf=is_per_device)
    return jax.tree.unflatten(treedef, result), ShareState(_varying(marked, axis_name, inner_axis_name))


def cuts_of(param_specs: PyTree | None, tree: PyTree, inner_axis_name: AxisName) -> list[Cut]:
    """How every leaf is divided."""
    devices = devices_along(inner_axis_name)
    return [Cut(devices, _specs.sharded_dim(s, inner_axis_name)) for s in _specs.by_leaf(param_specs, tree)]


def devices_along(inner_axis_name: AxisName) -> int:
    """How many devices are a worker.

    Raises:
        NameError: if the axis is not bound.
    """
    size = _compat.axis_size(inner_axis_name)
    if size is None:
        raise NameError(
            f"the axis {inner_axis_name!r} is not bound here: shares depend on its size; initialise and update inside"
            " jax.shard_map over both axes (gradcomp_jax.init_state and make_train_step do, with axis_name=(outer, inner))"
        )
    return size


def _join(stacked: Array, like: Array) -> Array:
    """The tensor of which ``stacked`` has all shares of a cut by rows."""
    return stacked.reshape(-1)[: like.size].reshape(like.shape)


def _mark(leaf: Any, devices: int) -> Any:
    """Marks what differs by device: all but single numbers, which all devices agree on."""
    if is_per_device(leaf):
        return dataclasses.replace(leaf, shares=leaf.shares * devices)
    if jnp.ndim(leaf) == 0:
        return leaf
    return PerDevice(leaf, leaf.shape[0], "replica", devices)


def _unmark(leaf: Any, devices: int, axis_name: AxisName) -> Any:
    """A state as the exchange knows it, in which what is equal on all workers is no longer marked."""
    if not is_per_device(leaf):
        return leaf
    shares = leaf.shares // devices
    if leaf.kind == "replica" and shares == 1:
        return _compat.invarying(leaf.value, axis_name)
    return dataclasses.replace(leaf, shares=shares)


def _mark_again(mark: Any, leaf: Any) -> Any:
    value = leaf.value if is_per_device(leaf) else leaf
    return dataclasses.replace(mark, value=value) if is_per_device(mark) else value


def _varying(state: Any, *axes: AxisName) -> Any:
    """Per-device values as differing along both axes, where that is tracked."""

    def cast(leaf: Any) -> Any:
        if not is_per_device(leaf):
            return leaf
        value = leaf.value
        for axis in axes:
            value = _compat.varying(value, axis)
        return dataclasses.replace(leaf, value=value)

    return jax.tree.map(cast, state, is_leaf=is_per_device)
