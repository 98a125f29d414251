"""What a transformation sends and keeps, read from its program for any number of workers: no devices, nothing compiled."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from gradcomp_jax import _mapped
from gradcomp_jax._typing import PyTree
from gradcomp_jax.audit import WireReport, wire_bytes


def lowered_bytes(
    tx: optax.GradientTransformation, params: PyTree, workers: int, *, axis_name: str = "workers"
) -> WireReport:
    """Bytes of one ``tx.update`` of gradients like ``params``, in a program lowered for an abstract mesh.

    Args:
        tx: averages over ``axis_name``.
        params: arrays or ``ShapeDtypeStruct``.
        workers: N.
        axis_name: of the workers.

    Returns:
        The bytes before a compiler has joined collectives: as many bytes as the compiled program sends, in as many
        collectives or more. Of a choice the last branch, which is the one in which gradients are finite.
    """

    def update(gradients: PyTree, params: PyTree) -> PyTree:
        return tx.update(jax.tree.map(lambda g: g[0], gradients), tx.init(params), params)[0]

    spec = PartitionSpec(axis_name)
    mesh = _mesh(workers, axis_name)
    mapped = jax.shard_map(update, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=PartitionSpec())
    own = _shapes(params)
    every = jax.tree.map(lambda a: jax.ShapeDtypeStruct((workers, *a.shape), a.dtype), own)
    lowered = jax.jit(mapped).trace(every, own).lower(lowering_platforms=("cpu",))
    return wire_bytes(lowered.as_text(dialect="hlo"), branch=-1)


def state_bytes(tx: optax.GradientTransformation, params: PyTree, workers: int, *, axis_name: str = "workers") -> int:
    """Bytes of state that each of so many workers keeps for gradients like ``params``."""
    mesh = _mesh(workers, axis_name)
    shapes = _mapped.local_shapes(tx.init, _shapes(params), in_specs=PartitionSpec(), mesh=mesh)
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes))


def _mesh(workers: int, axis_name: str) -> AbstractMesh:
    return AbstractMesh((workers,), (axis_name,), axis_types=(AxisType.Auto,))


def _shapes(params: PyTree) -> PyTree:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.result_type(a)), params)
