"""A data-parallel train step around any optax chain with an exchange in it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.training.gradients import local_value_and_grad
from gradcomp_jax.training.state import TrainState, check_axis, state_specs


def make_train_step(
    loss: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: AxisName = "data",
    has_aux: bool = False,
    donate: bool = True,
    check_vma: bool = True,
) -> jax.stages.Wrapped:
    """Compiles ``step(state, batch) -> (state, metrics)``: local gradients, exchange, update.

    Args:
        loss: ``loss(params, batch) -> scalar``, the mean over the batch it sees; ``(scalar, aux)`` with ``has_aux``.
        tx: an optax transformation that averages over ``axis_name``, such as ``optax.chain(gc.dgc(...),
            optax.sgd(0.1))``.
        mesh: the mesh of :func:`init_state`.
        axis_name: the axis of the workers.
        has_aux: ``aux`` (scalars) is averaged over the workers into ``metrics["aux"]``.
        donate: the new state takes the old one's memory; the old one must not be used again.
        check_vma: as for ``jax.shard_map``.

    Returns:
        A jitted function. ``batch`` is a tree whose leaves lead with the global batch, a multiple of the number of
        workers. ``metrics["loss"]`` is the mean loss, float32. ``step.lower(state, batch).compile()`` is what
        :func:`gradcomp_jax.wire_bytes` reads.

    Raises:
        ValueError: if the mesh has no such axis.
    """
    check_axis(mesh, axis_name)
    value_and_grad = local_value_and_grad(loss, axis_name=axis_name, has_aux=has_aux)
    update_with_extra = optax.with_extra_args_support(tx).update

    def local(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        value, gradient = value_and_grad(state.params, batch)
        updates, opt_state = update_with_extra(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        observed = {"loss": value[0], "aux": value[1]} if has_aux else {"loss": value}
        metrics = lax.pmean(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), observed), axis_name)
        return TrainState(state.step + 1, params, opt_state), metrics

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        specs = state_specs(state, axis_name=axis_name)
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, PartitionSpec(axis_name)),
            out_specs=(specs, PartitionSpec()),
            check_vma=check_vma,
        )
        return mapped(state, batch)

    return jax.jit(step, donate_argnums=(0,) if donate else ())
