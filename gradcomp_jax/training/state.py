"""The train state: where each part of it lives on a mesh."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gradcomp_jax import _checks
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.per_device import PerDevice, is_per_device


class TrainState(NamedTuple):
    """Attributes: ``step`` (int32 scalar), ``params`` and ``opt_state`` (trees)."""

    step: Array
    params: PyTree
    opt_state: PyTree


def state_specs(state: PyTree, *, axis_name: AxisName) -> PyTree:
    """The partition spec of every leaf: ``P(axis_name)`` for per-device state, ``P()`` for all else.

    Args:
        state: any tree of arrays or ``ShapeDtypeStruct``, such as an optax state or a :class:`TrainState`.
        axis_name: the axis of the workers.

    Returns:
        A tree of the same structure, for ``in_specs`` and ``out_specs`` of ``jax.shard_map``.
    """

    def spec(leaf: Any) -> Any:
        if is_per_device(leaf):
            return dataclasses.replace(leaf, value=PartitionSpec(axis_name))
        return PartitionSpec()

    return jax.tree.map(spec, state, is_leaf=is_per_device)


def state_axes(state: PyTree) -> PyTree:
    """``in_axes`` and ``out_axes`` for ``jax.vmap`` and ``jax.pmap``: 0 for per-device state, ``None`` for all else."""

    def axis(leaf: Any) -> Any:
        return dataclasses.replace(leaf, value=0) if is_per_device(leaf) else None

    return jax.tree.map(axis, state, is_leaf=is_per_device)


def state_shardings(state: PyTree, mesh: Mesh, *, axis_name: AxisName) -> PyTree:
    """:func:`state_specs` as shardings on a mesh."""
    return jax.tree.map(
        lambda s: NamedSharding(mesh, s),
        state_specs(state, axis_name=axis_name),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def init_state(
    params: PyTree, tx: optax.GradientTransformation, mesh: Mesh, *, axis_name: AxisName = "data"
) -> TrainState:
    """A fresh train state on a mesh: parameters replicated, per-device state split along the axis.

    Args:
        params: any tree of arrays: plain, ``flax.linen`` variables or ``flax.nnx`` state.
        tx: an optax transformation, with or without an exchange in it.
        mesh: with the axis among its names, of Auto or Explicit axis type.
        axis_name: the axis of the workers.

    Raises:
        ValueError: if the mesh has no such axis.
    """
    check_axis(mesh, axis_name)
    # A copy: the train step donates its state, and must not take the caller's parameters with it.
    params = jax.tree.map(jnp.array, params)
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))

    def start(params: PyTree) -> TrainState:
        return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params))

    specs = state_specs(_inside(start, params, mesh), axis_name=axis_name)
    # Through the same shard_map as a train step's state, so that the first step and the second are one program.
    return jax.jit(jax.shard_map(start, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs))(params)


def _inside(start: Callable[[PyTree], PyTree], params: PyTree, mesh: Mesh) -> PyTree:
    """Shapes of what ``start`` returns on one device of the mesh, where marks may depend on the size of an axis."""
    found: list[PyTree] = []

    def probe(params: PyTree) -> Array:
        found.append(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), start(params)))
        return jnp.zeros(())

    jax.eval_shape(jax.shard_map(probe, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec()), params)
    return found[0]


def check_axis(mesh: Mesh, axis_name: AxisName) -> None:
    """Refuses an axis that the mesh does not have."""
    for name in axis_name if isinstance(axis_name, tuple) else (axis_name,):
        _checks.one_of("axis_name", name, mesh.axis_names)


def per_device_leaves(state: PyTree) -> list[PerDevice]:
    """Every per-device value of a state."""
    return [x for x in jax.tree.leaves(state, is_leaf=is_per_device) if is_per_device(x)]
