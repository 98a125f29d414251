"""The exchange alone, or a whole train step, compiled from shapes: for audits and plans, without data or memory for it."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gradcomp_jax import _specs
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.training.state import TrainState, check_axis, init_state, state_shardings, state_specs
from gradcomp_jax.training.step import make_train_step


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
    for name in _specs.names_of(axis_name):
        workers *= mesh.shape[name]
    by_worker, everywhere = PartitionSpec(axis_name), PartitionSpec()
    state = _state_shapes(params, tx, mesh, axis_name)
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((workers, *leaf.shape), leaf.dtype), params)
    gradients = _placed(stacked, NamedSharding(mesh, by_worker))
    specs = state_specs(state.opt_state, axis_name=axis_name)

    def update(stacked: PyTree, state: PyTree, params: PyTree) -> Any:
        return tx.update(jax.tree.map(lambda g: g[0], stacked), state, params)

    mapped = jax.shard_map(update, mesh=mesh, in_specs=(by_worker, specs, everywhere), out_specs=(everywhere, specs))
    return jax.jit(mapped, donate_argnums=1).lower(gradients, state.opt_state, state.params)


def trace_step(
    loss: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: AxisName = "data",
    **options: Any,
) -> jax.stages.Traced:
    """Traces the step of :func:`gradcomp_jax.make_train_step` from shapes; ``.lower().compile()`` compiles it.

    Args:
        loss: ``loss(params, batch) -> scalar``.
        params: arrays or ``ShapeDtypeStruct``; only shapes and dtypes matter.
        batch: likewise; every leaf leads with the global batch.
        tx: an optax transformation that averages over ``axis_name``.
        mesh: of real devices or of a topology description, with the axis among its names.
        axis_name: the axis of the workers.
        **options: further arguments of :func:`gradcomp_jax.make_train_step`.

    Returns:
        What ``jax.jit(...).trace`` returns. Its arguments are the train state and the batch.

    Raises:
        ValueError: if the mesh has no such axis.
    """
    step = make_train_step(loss, tx, mesh, axis_name=axis_name, **options)
    by_worker = NamedSharding(mesh, PartitionSpec(axis_name))
    return step.trace(_state_shapes(params, tx, mesh, axis_name), _placed(batch, by_worker))


def _state_shapes(params: PyTree, tx: optax.GradientTransformation, mesh: Mesh, axis_name: AxisName) -> TrainState:
    """What :func:`init_state` returns, as shapes on the mesh."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    state = jax.eval_shape(lambda p: init_state(p, tx, mesh, axis_name=axis_name), shapes)
    return jax.tree.map(_place, state, state_shardings(state, mesh, axis_name=axis_name))


def _placed(tree: PyTree, sharding: NamedSharding) -> PyTree:
    return jax.tree.map(lambda leaf: _place(leaf, sharding), tree)


def _place(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
