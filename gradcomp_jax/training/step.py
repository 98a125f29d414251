"""Gradients that are still each worker's own, and a data-parallel train step around any optax chain with an exchange in it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from gradcomp_jax import _compat, _specs, per_device
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.training import refusals
from gradcomp_jax.training.state import TrainState, check_axis, has_replicas, lift_replicas, manual_specs, state_specs
from gradcomp_jax.transforms.bucketed import forward_order
from gradcomp_jax.transforms.context import with_context


def local_value_and_grad(
    loss: Callable[..., Any], *, axis_name: AxisName | None, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Returns what ``jax.value_and_grad`` does, for the gradient of this worker's loss alone.

    Inside ``jax.shard_map`` with ``check_vma=True``, ``jax.grad`` with respect to replicated parameters already sums over the
    axis, in a dense all-reduce. This casts the parameters to per-device values first; elsewhere it changes nothing. Integer
    leaves, which have no gradient, get zeros of their own dtype: leave them out of an exchange with ``optax.masked``.

    Args:
        loss: ``loss(params, *args) -> scalar``, or ``(scalar, aux)`` with ``has_aux``.
        axis_name: the axis that the workers lie along.
        has_aux: whether ``loss`` returns auxiliary output.

    Returns:
        A function with the arguments of ``loss`` that returns ``(value, gradient)``.
    """

    def value_and_grad(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        local = _compat.varying(params, axis_name)
        value, gradient = jax.value_and_grad(loss, has_aux=has_aux, allow_int=True)(local, *args, **kwargs)
        return value, jax.tree.map(_zero_if_none, gradient, params)

    return value_and_grad


def _zero_if_none(gradient: Any, param: Any) -> Any:
    """A gradient as optax takes it: JAX's of an integer is of a dtype that holds nothing."""
    return jnp.zeros_like(param) if gradient.dtype == jax.dtypes.float0 else gradient


def make_train_step(
    loss: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: AxisName = "data",
    has_aux: bool = False,
    donate: bool = True,
    check_vma: bool = True,
    param_specs: PyTree | None = None,
    mean_metrics: bool = True,
) -> Any:
    """Compiles ``step(state, batch) -> (state, metrics)``: local gradients, exchange, update.

    Args:
        loss: ``loss(params, batch) -> scalar``, the mean over the batch it sees; ``(scalar, aux)`` with ``has_aux``.
        tx: an optax transformation that averages over ``axis_name``, such as ``optax.chain(gc.dgc(...), optax.sgd(0.1))``.
        mesh: the mesh of :func:`init_state`.
        axis_name: the axis of the workers.
        has_aux: ``aux`` (scalars) is averaged over the workers into ``metrics["aux"]``.
        donate: the new state takes the old one's memory; the old one must not be used again.
        check_vma: as for ``jax.shard_map``.
        param_specs: the specs of :func:`init_state`. Parameters that lie along the axis of the workers (FSDP) are gathered for
            the loss, and ``tx`` is given their whole gradients and returns updates of the shards
            (:func:`gradcomp_jax.hierarchical`, :func:`gradcomp_jax.collectives.ReduceScatter`). Axes of the mesh that are not
            ``axis_name`` are left to the compiler; with parameters along one of them see :func:`gradcomp_jax.model_parallel`.
        mean_metrics: whether ``metrics`` are means over the workers, which costs an all-reduce of a few bytes: on links of long
            latency as much as the exchange. Otherwise they are the workers' own, ``[N]``, split along the axis.

    Returns:
        A jitted function. ``batch`` is a tree whose leaves lead with the global batch, a multiple of the number of
        workers. ``metrics["loss"]`` is the mean loss, float32. ``step.lower(state, batch).compile()`` is what
        :func:`gradcomp_jax.wire_bytes` reads. On simulated CPU devices, read the loss or block in every step: XLA's CPU
        collectives wait in threads of one small pool, steps that queue up can starve it, and the process ends after 40 s.

    Raises:
        ValueError: if the mesh has no such axis; when traced, if the state was not initialised on the mesh, an Explicit mesh's
            batch is not split, or the update of a parameter has not its shard's shape, or differs by worker because no exchange
            averages its gradient; when called, if the state was donated before.
    """
    check_axis(mesh, axis_name)
    names = _specs.names_of(axis_name)
    value_and_grad = local_value_and_grad(loss, axis_name=axis_name, has_aux=has_aux)
    update_with_extra = optax.with_extra_args_support(tx).update

    def local(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        replicas = has_replicas(state)
        if replicas:
            state = per_device.lower(state)
        params = _whole(state.params, param_specs, names)
        value, gradient = value_and_grad(params, batch)
        # Read only if the exchange asks for it: it costs another trace of the loss.
        order = with_context({}, forward_order=lambda: forward_order(loss, params, batch))
        with refusals.branches_explained():
            updates, opt_state = update_with_extra(gradient, state.opt_state, state.params, **order)
        if not replicas:
            refusals.refuse_updates(updates, state.params, axis_name)
        params = optax.apply_updates(state.params, updates)
        observed = {"loss": value[0], "aux": value[1]} if has_aux else {"loss": value}
        metrics = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), observed)
        if mean_metrics:
            metrics = lax.pmean(metrics, axis_name)
        else:
            metrics = jax.tree.map(lambda x: _compat.varying(x, axis_name)[None], metrics)
        new = TrainState(state.step + 1, params, opt_state)
        return (lift_replicas(new) if replicas else new), metrics

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        refusals.refuse_unmapped(state.opt_state, mesh, axis_name)
        refusals.refuse_unplaced(batch, mesh, axis_name)
        manual = None if has_replicas(state) else manual_specs(param_specs, state.params, axis_name)
        specs = state_specs(state, axis_name=axis_name, param_specs=manual)
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            axis_names=set(names),
            in_specs=(specs, PartitionSpec(axis_name)),
            out_specs=(specs, PartitionSpec() if mean_metrics else PartitionSpec(axis_name)),
            check_vma=check_vma,
        )
        return mapped(state, batch)

    return TrainStep(jax.jit(step, donate_argnums=(0,))) if donate else jax.jit(step)


class TrainStep:
    """A jitted step that refuses a state it was given before; all else is the jitted function's own."""

    def __init__(self, jitted: jax.stages.Wrapped) -> None:
        """Wraps a function that donates its first argument."""
        self._jitted = jitted

    def __call__(self, state: Any, *args: Any) -> Any:
        """Runs the step.

        Raises:
            ValueError: if an earlier step has taken the memory of ``state``.
        """
        refusals.refuse_donated(state)
        return self._jitted(state, *args)

    def __getattr__(self, name: str) -> Any:
        """Returns what the jitted function has: ``lower``, ``trace``, ``eval_shape``, ``clear_cache``."""
        return getattr(self._jitted, name)


def _whole(params: PyTree, param_specs: PyTree | None, names: tuple[Any, ...]) -> PyTree:
    """Parameters of which every device has a shard, gathered; the others as they are."""
    leaves, treedef = jax.tree.flatten(params)
    for i, spec in enumerate(_specs.by_leaf(param_specs, params)):
        for name in names:
            dim = _specs.sharded_dim(spec, name)
            if dim is not None:
                leaves[i] = lax.all_gather(leaves[i], name, axis=dim, tiled=True)
    return jax.tree.unflatten(treedef, leaves)
