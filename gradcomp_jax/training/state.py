"""The train state: where each part of it, and a batch, lives on a mesh."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gradcomp_jax import _checks, _compat, _specs, per_device
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.per_device import is_per_device
from gradcomp_jax.replicas import MARKED
from gradcomp_jax.training import refusals
from gradcomp_jax.transforms import ExchangeState


class TrainState(NamedTuple):
    """Attributes: ``step`` (int32 scalar), ``params`` and ``opt_state`` (trees)."""

    step: Array
    params: PyTree
    opt_state: PyTree


def state_specs(state: PyTree, *, axis_name: AxisName, param_specs: PyTree | None = None) -> PyTree:
    """Returns the partition spec of every leaf: ``P(axis_name)`` for per-device state, ``P()`` for all else.

    Args:
        state: any tree with :class:`PerDevice` nodes in it, of arrays or shapes.
        axis_name: the axis of the workers.
        param_specs: the parameters' specs, a tree or a prefix of it; ``state`` is then a :class:`TrainState`, in which
            whatever has a parameter's shape and ends with its path (Adam's moments, for instance) lies as it does.

    Returns:
        A tree of the same structure, for ``in_specs`` and ``out_specs`` of ``jax.shard_map``.
    """
    specs = per_device.state_specs(state, axis_name=axis_name)
    if param_specs is None:
        return specs
    by_path = {
        path: (leaf.shape, spec)
        for (path, leaf), spec in zip(
            jax.tree_util.tree_leaves_with_path(state.params), _specs.by_leaf(param_specs, state.params), strict=True
        )
    }

    def mirror(path: tuple, leaf: Any, spec: Any) -> Any:
        if is_per_device(leaf):
            return spec
        for start in range(len(path)):
            shape, found = by_path.get(path[start:], (None, None))
            if shape == leaf.shape:
                return found
        return spec

    moments = jax.tree_util.tree_map_with_path(mirror, state.opt_state, specs.opt_state, is_leaf=is_per_device)
    return specs._replace(params=_specs.like(param_specs, state.params), opt_state=moments)


def state_axes(state: PyTree) -> PyTree:
    """``in_axes`` and ``out_axes`` for ``jax.vmap`` and ``jax.pmap``: 0 for per-device state, ``None`` for all else."""

    def axis(leaf: Any) -> Any:
        return dataclasses.replace(leaf, value=0) if is_per_device(leaf) else None

    return jax.tree.map(axis, state, is_leaf=is_per_device)


def state_shardings(state: PyTree, mesh: Mesh, *, axis_name: AxisName, param_specs: PyTree | None = None) -> PyTree:
    """Returns :func:`state_specs` as shardings on a mesh."""
    return jax.tree.map(
        lambda s: NamedSharding(mesh, s),
        state_specs(state, axis_name=axis_name, param_specs=param_specs),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def data_sharding(mesh: Mesh, *, axis_name: AxisName = "data") -> NamedSharding:
    """Returns the sharding of a batch whose leading dimension is split over the workers, for ``jax.device_put``.

    Args:
        mesh: with the axis among its names.
        axis_name: the axis of the workers.

    Raises:
        ValueError: if the mesh has no such axis.
    """
    check_axis(mesh, axis_name)
    return NamedSharding(mesh, PartitionSpec(axis_name))


def init_state(
    params: PyTree,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: AxisName = "data",
    param_specs: PyTree | None = None,
    replicas: bool = False,
) -> TrainState:
    """Returns a fresh train state on a mesh: parameters where their specs say, per-device state split along the axis.

    Args:
        params: any tree of arrays: plain, ``flax.linen`` variables or ``flax.nnx`` state; whole, also where they are to be
            sharded.
        tx: an optax transformation, with or without an exchange in it.
        mesh: with the axis among its names, of Auto or Explicit axis type. Further axes are left to the compiler.
        axis_name: the axis of the workers.
        param_specs: the parameters' ``PartitionSpec`` on the mesh, a tree or a prefix of it; replicated by default.
        replicas: whether every worker has parameters of its own, equal at first, as the methods of
            :mod:`gradcomp_jax.replicas` need it: parameters and the optimizer's state are then :class:`PerDevice` (all but
            what an exchange or such a method holds, which say by themselves what differs). :func:`make_train_step` sees
            that from the state; :func:`gradcomp_jax.consolidate` makes one set of parameters again.

    Raises:
        ValueError: if the mesh has no such axis, or replicas are asked to lie along it.
    """
    check_axis(mesh, axis_name)
    if replicas and param_specs is not None:
        raise ValueError("replicas=True gives every worker whole parameters: leave param_specs out")
    places = _specs.by_leaf(param_specs, params)
    # A copy: the train step donates its state, and must not take the caller's parameters with it.
    leaves = [
        jax.device_put(jnp.array(p), NamedSharding(mesh, s))
        for p, s in zip(jax.tree.leaves(params), places, strict=True)
    ]
    params = jax.tree.unflatten(jax.tree.structure(params), leaves)

    def start(params: PyTree) -> TrainState:
        if replicas:
            params = _compat.varying(params, axis_name)
        state = TrainState(jnp.zeros((), jnp.int32), params, tx.init(params))
        return lift_replicas(state) if replicas else state

    names = _specs.names_of(axis_name)
    mapping: dict[str, Any] = {"mesh": mesh, "axis_names": set(names)}
    in_specs = manual_specs(param_specs, params, axis_name)
    shapes = _compat.local_shapes(start, params, in_specs=(in_specs,), **mapping)
    specs = state_specs(shapes, axis_name=axis_name, param_specs=None if replicas else in_specs)
    mapped = jax.shard_map(start, in_specs=(in_specs,), out_specs=specs, **mapping)

    def place(params: PyTree) -> TrainState:
        state = mapped(params)
        if param_specs is None or AxisType.Explicit in mesh.axis_types:
            return state
        # Zeros have no sharding of their own: moments would lie whole on every device until the first step.
        places = state_shardings(state, mesh, axis_name=axis_name, param_specs=param_specs)
        return jax.tree.map(_constrain, state, places, is_leaf=is_per_device)

    # Through the same shard_map as a train step's state, so that the first step and the second are one program.
    state = jax.jit(place)(params)
    refusals.warn_of_two_momenta(state.opt_state)
    return state


def lift_replicas(state: TrainState) -> TrainState:
    """Marks parameters and optimizer state of one worker as its own.

    The train step takes the mark off before an update and puts it on again after it. So any optax chain runs on replicas, and
    specs, checkpoints and a change of the number of workers follow from the mark, as they do for residuals.
    """
    return state._replace(
        params=per_device.lift(state.params),
        opt_state=per_device.lift(state.opt_state, marked=(ExchangeState, *MARKED)),
    )


def has_replicas(state: TrainState) -> bool:
    """Returns whether every worker has parameters of its own."""
    return bool(per_device.nodes_of(state.params, per_device.is_lifted))


def _constrain(leaf: Any, place: Any) -> Any:
    """An array where it belongs; per-device state is where ``shard_map`` has put it."""
    return leaf if is_per_device(leaf) else lax.with_sharding_constraint(leaf, place)


def manual_specs(param_specs: PyTree | None, params: PyTree, axis_name: AxisName) -> PyTree:
    """Returns the part of the parameters' specs over the mapped axes, for ``in_specs`` of a ``shard_map`` over them."""
    names = _specs.names_of(axis_name)
    return jax.tree.map(lambda s: _specs.only(s, names), _specs.like(param_specs, params))


def check_axis(mesh: Mesh, axis_name: AxisName) -> None:
    """Refuses an axis that the mesh does not have."""
    for name in _specs.names_of(axis_name):
        _checks.one_of("axis_name", name, mesh.axis_names)
