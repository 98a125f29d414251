"""The train state, and where its parts and a batch lie on a mesh."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gradcomp_jax import _arguments, _checks, _specs, per_device
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.core import ExchangeState
from gradcomp_jax.core.overwritten import COLLECTION, has_overwritten, trained
from gradcomp_jax.per_device import is_per_device
from gradcomp_jax.replicas import MARKED
from gradcomp_jax.transforms.worker_shards import ShardState


class TrainState(NamedTuple):
    """Holds what a train step takes and returns.

    Attributes:
        step: int32 scalar, steps so far.
        params: the parameters.
        opt_state: the optimizer's state, with what exchanges keep.
        model_state: what the model itself changes, such as the statistics of batch normalisation; ``()`` without.
    """

    step: Array
    params: PyTree
    opt_state: PyTree
    model_state: PyTree = ()


class CopiedTrainState(NamedTuple):
    """Extends :class:`TrainState` with the copies from which gathered parameters differ.

    It is a separate type, so that checkpoints of other states do not change. ``param_copy`` has whole copies of the parameters
    that lie along the axis, equal on all workers, and ``()`` for each of the others.
    """

    step: Array
    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    param_copy: PyTree


def with_parts(state: Any, **changes: Any) -> Any:
    """Returns a :class:`TrainState`, or a state with ``replace`` such as flax's, with some parts replaced."""
    replace = getattr(state, "replace", None)
    return replace(**changes) if replace else state._replace(**changes)


def model_field(state: Any) -> str | None:
    """Returns the name of the part that the model itself changes; ``None`` if the state has none or it is empty."""
    return next((name for name in ("model_state", "batch_stats") if jax.tree.leaves(getattr(state, name, ()))), None)


@_arguments.checked
def state_specs(state: PyTree, *, axis_name: AxisName = "data", param_specs: PyTree | None = None) -> PyTree:
    """Returns the partition spec of every leaf: ``P(axis_name)`` for per-device state, ``P()`` for all else.

    Example:
        >>> state = gc.init_state(params, optax.chain(gc.topk_sgd(axis_name="data"), optax.sgd(0.1)), mesh)
        >>> gc.state_specs(state).params["kernel"] == jax.P()  # equal on every worker
        True

    Args:
        state: any tree with :class:`PerDevice` nodes in it, of arrays or shapes.
        axis_name: the axis of the workers.
        param_specs: the parameters' specs, a tree or a prefix of it; ``state`` is then a :class:`TrainState`, in which
            a leaf with a parameter's shape and a path that ends with its path (Adam's moments, for instance) lies as it does.

    Returns:
        A tree of the same structure, for ``in_specs`` and ``out_specs`` of ``jax.shard_map``.
    """
    specs = per_device.state_specs(state, axis_name=axis_name)
    if param_specs is None:
        return specs
    own, own_specs = trained(state.params), trained(_specs.like(param_specs, state.params))
    by_path = {
        path: (leaf.shape, spec)
        for (path, leaf), spec in zip(
            jax.tree_util.tree_leaves_with_path(own), _specs.by_leaf(own_specs, own), strict=True
        )
    }

    def mirror(path: tuple, leaf: Any, spec: Any) -> Any:
        if is_per_device(leaf):
            return spec
        for start in range(len(path) + 1):
            shape, found = by_path.get(path[start:], (None, None))
            if shape == leaf.shape:
                return found
        return spec

    moments = jax.tree_util.tree_map_with_path(mirror, state.opt_state, specs.opt_state, is_leaf=is_per_device)
    return with_parts(specs, params=_specs.like(param_specs, state.params), opt_state=moments)


@_arguments.checked
def state_axes(state: PyTree) -> PyTree:
    """Returns ``in_axes`` and ``out_axes`` for ``jax.vmap`` and ``jax.pmap``: 0 for per-device state, ``None`` for all else.

    Example:
        >>> state = gc.init_state(params, optax.chain(gc.topk_sgd(axis_name="data"), optax.sgd(0.1)), mesh)
        >>> gc.state_axes(state).params["kernel"] is None  # equal on every worker
        True

    Args:
        state: any tree with :class:`PerDevice` nodes in it.
    """

    def axis(leaf: Any) -> Any:
        return dataclasses.replace(leaf, value=0) if is_per_device(leaf) else None

    return jax.tree.map(axis, state, is_leaf=is_per_device)


@_arguments.checked
def state_shardings(
    state: PyTree, mesh: Mesh, *, axis_name: AxisName = "data", param_specs: PyTree | None = None
) -> PyTree:
    """Returns :func:`state_specs` as shardings on a mesh.

    Per-device state of :func:`gradcomp_jax.model_parallel` is split along its model axes too.

    Example:
        >>> state = gc.init_state(params, optax.chain(gc.topk_sgd(axis_name="data"), optax.sgd(0.1)), mesh)
        >>> gc.state_shardings(state, mesh).params["kernel"].spec == jax.P()  # equal on every worker
        True

    Args:
        state: as for :func:`state_specs`.
        mesh: a mesh with this axis.
        axis_name: as for :func:`state_specs`.
        param_specs: as for :func:`state_specs`.
    """

    def of_shards(node: Any, spec: Any) -> Any:
        if not isinstance(node, ShardState):
            return spec
        # A worker's devices have rows of their own. in_specs over ``axis_name`` do not name the axes of these devices.
        return per_device.state_specs(node, axis_name=tuple(name for name in node.axes if name in mesh.axis_names))

    specs = state_specs(state, axis_name=axis_name, param_specs=param_specs)
    specs = jax.tree.map(of_shards, state, specs, is_leaf=lambda x: isinstance(x, ShardState) or is_per_device(x))
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


@_arguments.checked
def data_sharding(mesh: Mesh, *, axis_name: AxisName = "data") -> NamedSharding:
    """Returns the sharding of a batch whose leading dimension is split over the workers, for ``jax.device_put``.

    Example:
        >>> batch = jax.device_put(jnp.ones((16, 256)), gc.data_sharding(mesh))
        >>> batch.addressable_shards[0].data.shape
        (2, 256)

    Args:
        mesh: a mesh with this axis.
        axis_name: the axis of the workers.

    Returns:
        A ``NamedSharding`` with the spec ``P(axis_name)``.

    Raises:
        ValueError: if the mesh has no such axis.
    """
    check_axis(mesh, axis_name)
    return NamedSharding(mesh, PartitionSpec(axis_name))


def lift_replicas(state: Any) -> Any:
    """Marks parameters and optimizer state of one worker as its own.

    The train step removes the mark before an update and adds it again after it. So any optax chain runs on replicas, and specs,
    checkpoints and a change of the number of workers follow from the mark, as they do for residuals.
    """
    return with_parts(state, params=per_device.lift(state.params), opt_state=lift_opt_state(state.opt_state))


def lift_opt_state(opt_state: PyTree) -> PyTree:
    """Marks the optimizer's state of one worker as its own, except what an exchange or a method of replicas marks itself."""
    return per_device.lift(opt_state, marked=(ExchangeState, *MARKED))


def has_replicas(state: Any) -> bool:
    """Returns whether every worker has its own parameters."""
    return bool(per_device.nodes_of(state.params, per_device.is_lifted))


def manual_specs(param_specs: PyTree | None, params: PyTree, axis_name: AxisName) -> PyTree:
    """Returns the part of the parameters' specs over the mapped axes, for ``in_specs`` of a ``shard_map`` over them."""
    names = _specs.names_of(axis_name)
    specs = jax.tree.map(lambda s: _specs.only(s, names), _specs.like(param_specs, params))
    if has_overwritten(params) and any(any(s) for s in jax.tree.leaves(specs[COLLECTION])):
        raise ValueError(
            f"all workers have the collection {COLLECTION!r} alike, and param_specs lay a part of it along {axis_name!r}: give"
            f" {{'params': ..., '{COLLECTION}': jax.P()}}"
        )
    return specs


def along_axis(param_specs: PyTree | None, params: PyTree, axis_name: AxisName) -> bool:
    """Returns whether some parameters lie along the axis of the workers, so that a device has a shard of them."""
    names = _specs.names_of(axis_name)
    return any(
        _specs.sharded_dim(spec, name) is not None for spec in _specs.by_leaf(param_specs, params) for name in names
    )


def check_axis(mesh: Mesh, axis_name: AxisName) -> None:
    """Refuses an axis that the mesh does not have."""
    for name in _specs.names_of(axis_name):
        _checks.one_of("axis_name", name, mesh.axis_names)
