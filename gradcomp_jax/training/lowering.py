"""The exchange alone, compiled from shapes: for audits and plans, without data or memory for it."""

from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.training.state import check_axis, state_specs


def lower_update(
    params: PyTree, tx: optax.GradientTransformation, mesh: Mesh, *, axis_name: AxisName = "data"
) -> jax.stages.Lowered:
    """Lowers one ``tx.update`` over a mesh, with the state donated, as a train step would run it.

    ``gc.wire_bytes(gc.lower_update(params, tx, mesh).compile())`` says what a model of these shapes would send; the
    mesh may be of real devices or of a topology description.

    Args:
        params: arrays or ``ShapeDtypeStruct``; only shapes and dtypes matter.
        tx: an optax transformation that averages over ``axis_name``.
        mesh: with the axis among its names.
        axis_name: the axis of the workers.

    Returns:
        What ``jax.jit(...).lower`` returns. Its arguments are per-device gradients, stacked on a new leading
        dimension, the state and the parameters.

    Raises:
        ValueError: if the mesh has no such axis.
    """
    check_axis(mesh, axis_name)
    workers = 1
    for name in axis_name if isinstance(axis_name, tuple) else (axis_name,):
        workers *= mesh.shape[name]
    by_worker, everywhere = PartitionSpec(axis_name), PartitionSpec()

    def spec(leaf: Any, lead: tuple[int, ...], place: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, *leaf.shape), leaf.dtype, sharding=NamedSharding(mesh, place))

    shapes = jax.tree.map(lambda leaf: spec(leaf, (), everywhere), params)
    gradients = jax.tree.map(lambda leaf: spec(leaf, (workers,), by_worker), params)
    specs = state_specs(jax.eval_shape(tx.init, shapes), axis_name=axis_name)
    state = jax.eval_shape(jax.shard_map(tx.init, mesh=mesh, in_specs=everywhere, out_specs=specs), shapes)

    def update(stacked: PyTree, state: PyTree, params: PyTree) -> Any:
        return tx.update(jax.tree.map(lambda g: g[0], stacked), state, params)

    mapped = jax.shard_map(update, mesh=mesh, in_specs=(by_worker, specs, everywhere), out_specs=(everywhere, specs))
    return jax.jit(mapped, donate_argnums=1).lower(gradients, state, shapes)
