"""Compiles the exchange alone from shapes, for audits and plans; it needs neither data nor memory."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gradcomp_jax import _arguments, _specs, per_device
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.core.overwritten import trained
from gradcomp_jax.training import refusals
from gradcomp_jax.training.initial import init_state
from gradcomp_jax.training.state import TrainState, check_axis, lift_opt_state, state_shardings, state_specs


@_arguments.checked
def lower_update(
    params: PyTree,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: AxisName = "data",
    replicas: bool = False,
) -> jax.stages.Lowered:
    """Lowers one ``tx.update`` over a mesh, with the state donated, as a train step would run it.

    ``gc.wire_bytes(gc.lower_update(params, tx, mesh).compile())`` says what a model of these shapes would send. The
    mesh may be of real devices or of a topology description.

    Example:
        >>> tx = optax.chain(gc.dense(axis_name="data"), optax.sgd(0.1))
        >>> lowered = gc.lower_update(params, tx, mesh)
        >>> "all_reduce" in lowered.as_text()
        True

    Args:
        params: arrays or ``ShapeDtypeStruct``; only shapes and dtypes matter.
        tx: an optax transformation that averages over ``axis_name``.
        mesh: a mesh with this axis.
        axis_name: the axis of the workers.
        replicas: whether every worker has its own parameters, as for :func:`gradcomp_jax.init_state`. The updates are then
            stacked as the gradients are.

    Returns:
        What ``jax.jit(...).lower`` returns. Its arguments are per-device gradients, stacked on a new leading
        dimension, the state and the parameters; its results are the new state and the updates.

    Raises:
        ValueError: if the mesh has no such axis, or an update differs by worker because no exchange averages its gradient.
        NameError: for an exchange over another axis.
    """
    check_axis(mesh, axis_name)
    workers = _specs.devices_along(mesh, axis_name)
    by_worker, everywhere = PartitionSpec(axis_name), PartitionSpec()
    state = state_shapes(params, tx, mesh, axis_name, replicas=replicas)
    own = trained(state.params)
    place = NamedSharding(mesh, by_worker)
    gradients = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct((workers, *jnp.shape(p)), jnp.result_type(p), sharding=place), trained(params)
    )
    specs = state_specs(state.opt_state, axis_name=axis_name)

    def update(stacked: PyTree, state: PyTree, params: PyTree) -> Any:
        if replicas:
            state, params = per_device.lower((state, params))
        with refusals.update_explained(axis_name):
            updates, state = tx.update(jax.tree.map(lambda g: g[0], stacked), state, params)
        if replicas:
            state, updates = lift_opt_state(state), per_device.lift(updates)
        else:
            refusals.refuse_updates(updates, params, axis_name)
        # The state comes first: donated arrays go to the first results of their shape, and updates have the shapes of memories.
        return state, updates

    of_params = by_worker if replicas else everywhere
    mapped = _specs.mapped(update, mesh, axis_name, (by_worker, specs, of_params), (specs, of_params))
    return jax.jit(mapped, donate_argnums=1).lower(gradients, state.opt_state, own)


def state_shapes(
    params: PyTree, tx: optax.GradientTransformation, mesh: Mesh, axis_name: AxisName, *, replicas: bool = False
) -> TrainState:
    """Returns what :func:`init_state` returns, as shapes on the mesh."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), params)
    state = jax.eval_shape(lambda p: init_state(p, tx, mesh, axis_name=axis_name, replicas=replicas), shapes)
    places = state_shardings(state, mesh, axis_name=axis_name)
    return jax.tree.map(lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), state, places)
