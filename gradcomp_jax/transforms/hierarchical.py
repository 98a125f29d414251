"""An exchange over slow links between workers that are several devices joined by fast ones."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from gradcomp_jax import _compat
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.collectives import fused
from gradcomp_jax.per_device import PerDevice, is_per_device
from gradcomp_jax.transforms.exchange import INNER_AXIS, refuse_reduced


class HierarchicalState(NamedTuple):
    """Attributes: ``share``, the state of the exchange of each device's share."""

    share: Any


def hierarchical(
    exchange: optax.GradientTransformation, *, axis_name: AxisName, inner_axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
    r"""Averages densely over a fast axis and compressed over a slow one, each device with its share of the data.

    The n devices along ``inner_axis_name`` (a node, a TPU slice) are one worker. Their gradients are averaged by a dense
    reduce-scatter, which leaves each with 1/n of every tensor; that share goes through ``exchange`` over ``axis_name``;
    an all-gather inside the worker puts the update together. So 1/n of the payload leaves each device, n links carry it
    at once, and memories are of the share alone.

    What is exchanged is the mean gradient of a worker: local clipping, momentum and error feedback in ``exchange`` are
    those of workers, not of devices. A tensor is cut along the rows of the matrix of its last dimension against all
    others, so the share of a matrix is a matrix; where the devices do not divide the rows, zeros fill them up. What the
    exchange says of a tensor (a scale, a size, a selection) it says of the share.

    State: that of ``exchange``, every array of it per device. Use both axes wherever the axis of the workers is asked
    for: ``gc.init_state(..., axis_name=("slices", "chips"))``, the outer one first; ``old`` and ``new`` of
    :func:`gradcomp_jax.resize_workers` count outer workers.

    Example::

        tx = gc.hierarchical(gc.dgc(axis_name="slices", density=0.001), axis_name="slices", inner_axis_name="chips")

    Args:
        exchange: a method or :func:`gradcomp_jax.exchange` over ``axis_name``, or a chain with one in it.
        axis_name: the slow axis, between workers.
        inner_axis_name: the fast axis, within a worker.

    Raises:
        ValueError: if the two axes are the same; when traced, if the gradients are already reduced over one of them.
        NameError: when traced outside one of the axes.

    References:
        Jia et al., 2018, https://arxiv.org/abs/1807.11205, section 3 (hierarchical all-reduce).
    """
    if axis_name == inner_axis_name:
        raise ValueError(f"axis_name and inner_axis_name must differ, got {axis_name!r} for both")
    inside = optax.with_extra_args_support(exchange)

    def init(params: PyTree) -> HierarchicalState:
        devices = _devices(inner_axis_name)
        shares = jax.tree.map(lambda p: jnp.zeros(_cut_shape(jnp.shape(p), devices)[1:], jnp.float32), params)
        state = jax.tree.map(lambda leaf: _mark(leaf, devices), inside.init(shares), is_leaf=is_per_device)
        return HierarchicalState(_varying(state, axis_name, inner_axis_name))

    def update(
        updates: PyTree, state: HierarchicalState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, HierarchicalState]:
        devices = _devices(inner_axis_name)
        refuse_reduced(updates, inner_axis_name)
        leaves, treedef = jax.tree.flatten(updates)
        scattered = fused.reduce_scatter([_cut(g.astype(jnp.float32), devices) for g in leaves], inner_axis_name)
        # The mean over the worker's devices, in float32: the exchange rounds it once, and not before.
        shares = jax.tree.unflatten(treedef, [s / devices for s in scattered])
        index = _compat.axis_index(inner_axis_name)
        mine = jax.tree.map(lambda p: lax.dynamic_index_in_dim(_cut(p, devices), index, keepdims=False), params)
        before = jax.tree.map(lambda leaf: _unmark(leaf, axis_name), state.share, is_leaf=is_per_device)
        moved, after = inside.update(shares, before, mine, **{**extra, INNER_AXIS: inner_axis_name})
        whole = fused.all_gather(jax.tree.leaves(moved), inner_axis_name)
        result = [w.reshape(-1)[: g.size].reshape(g.shape).astype(g.dtype) for w, g in zip(whole, leaves, strict=True)]
        marked = jax.tree.map(_mark_again, state.share, after, is_leaf=is_per_device)
        return jax.tree.unflatten(treedef, result), HierarchicalState(_varying(marked, axis_name, inner_axis_name))

    return optax.GradientTransformationExtraArgs(init, update)


def _devices(inner_axis_name: AxisName) -> int:
    size = _compat.axis_size(inner_axis_name)
    if size is None:
        raise NameError(
            f"the axis {inner_axis_name!r} is not bound here: shares depend on its size; initialise and update inside"
            " jax.shard_map over both axes (gradcomp_jax.init_state and make_train_step do, with axis_name=(outer, inner))"
        )
    return size


def _cut_shape(shape: tuple[int, ...], devices: int) -> tuple[int, ...]:
    """All shares of a tensor: ``[devices, rows, columns]``, or ``[devices, entries]`` of what has no columns."""
    if len(shape) < 2:
        return devices, -(-math.prod(shape) // devices)
    return devices, -(-math.prod(shape[:-1]) // devices), shape[-1]


def _cut(x: Array, devices: int) -> Array:
    """The shares, with zeros at the end of the last ones."""
    shape = _cut_shape(x.shape, devices)
    flat = x.reshape(-1)
    return jnp.pad(flat, (0, math.prod(shape) - flat.size)).reshape(shape)


def _mark(leaf: Any, devices: int) -> Any:
    """Marks what differs by device: all but single numbers, which all devices agree on."""
    if is_per_device(leaf):
        return dataclasses.replace(leaf, shares=devices)
    if jnp.ndim(leaf) == 0:
        return leaf
    return PerDevice(leaf, leaf.shape[0], "replica", devices)


def _unmark(leaf: Any, axis_name: AxisName) -> Any:
    """A state as the exchange knows it, in which what is equal on all workers is no longer marked."""
    if is_per_device(leaf) and leaf.kind == "replica":
        return _compat.invarying(leaf.value, axis_name)
    return leaf


def _mark_again(mark: Any, leaf: Any) -> Any:
    return dataclasses.replace(mark, value=leaf) if is_per_device(mark) and not is_per_device(leaf) else leaf


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
