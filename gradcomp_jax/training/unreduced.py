"""Runs a chain with an exchange in plain ``jax.jit``, on each worker's gradients, which are not added up."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from gradcomp_jax import _arguments, _compat, _specs, per_device
from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.core.context import with_context
from gradcomp_jax.core.overwritten import refuse_overwritten
from gradcomp_jax.core.placeholders import is_placeholder
from gradcomp_jax.per_device import is_per_device
from gradcomp_jax.training import refusals
from gradcomp_jax.training.calls import refuse_other_gradient
from gradcomp_jax.training.initial import MappedInit, init_opt_state
from gradcomp_jax.training.order import refuse_lookahead
from gradcomp_jax.training.other_chain import updated
from gradcomp_jax.training.pinned import PinWatch, refuse_whole
from gradcomp_jax.training.state import check_axis


@_arguments.checked
def unreduced(
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: AxisName = "data",
    param_specs: PyTree | None = None,
    check_vma: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Runs a chain with an exchange on gradients that the workers have not added up, outside of the axis.

    In a loop of plain ``jax.jit`` over sharded arrays the compiler adds up gradients, densely, before any transformation sees
    them. This function takes each worker's own gradients and maps ``tx`` over the workers::

        tx = gc.unreduced(optax.chain(gc.dgc(axis_name="data"), optax.sgd(0.1)), mesh)
        value_and_grad = gc.local_value_and_grad(loss, axis_name="data", mesh=mesh)

    ``init`` and ``update`` are then called like those of any optax transformation, in ``jax.jit`` or not, also by flax's
    ``TrainState.create`` and the like. Gradients come from :func:`gradcomp_jax.local_value_and_grad` with
    ``mesh=``. On a mesh whose axis is of Explicit type they may also come from ``jax.grad`` of the mean loss over the whole
    batch, with respect to ``jax.reshard(params, jax.P(reduced={"data"}))``: they are then arrays of type
    ``unreduced={"data"}``. Gradients of several micro-batches may be added up before one update. An array ``[N, ...]`` of
    one gradient for each of N workers, from a ``jax.vmap`` of your own for instance, is marked by
    ``gc.PerDevice(array, rows=1, lifted=True)``.

    With ``weight=`` (see :func:`gradcomp_jax.weighted`) ``update`` takes the weights of all workers: ``[N]``.

    State: that of ``tx``, per-device state split along the axis. Adam's moments, and all else of a parameter's shape, lie as it
    does along the other axes of the mesh. Wire: that of ``tx``.

    Example:
        >>> tx = gc.unreduced(optax.chain(gc.dense(axis_name="data"), optax.sgd(0.1)), mesh)
        >>> value_and_grad = jax.jit(gc.local_value_and_grad(loss, axis_name="data", mesh=mesh))
        >>> value, gradient = value_and_grad(params, batch)
        >>> updates, opt_state = jax.jit(tx.update)(gradient, jax.jit(tx.init)(params), params)
        >>> updates["kernel"].shape
        (256, 256)

    Args:
        tx: an optax transformation that averages over ``axis_name``; all replicas have the same parameters.
        mesh: a mesh with this axis. Further axes are left to the compiler.
        axis_name: the axis of the workers.
        param_specs: where the parameters lie along the other axes, as for :func:`init_state`. By default that is read, for axes
            of Auto type, from the arrays that ``init`` is given. In ``jax.jit`` and ``jax.eval_shape`` only a sharding
            constraint that makes a parameter is seen: without it and without ``param_specs``, state is replicated over them.
        check_vma: as for ``jax.shard_map``; False for a chain that only the tracking refuses, whose updates are then unchecked.

    Returns:
        A transformation for use outside of the axis. Its updates are equal on every worker.

    Raises:
        ValueError: if the mesh has no such axis; when traced, inside the axis, for gradients that are already added up
            or not one for each worker, weights that are not ``[N]``, and as :func:`make_train_step` does for a chain without an
            exchange.
    """
    check_axis(mesh, axis_name)
    workers = _specs.devices_along(mesh, axis_name)
    everywhere = PartitionSpec()
    pins = PinWatch(mesh, axis_name)

    def init(params: PyTree) -> PyTree:
        if is_placeholder(params):
            return tx.init(params)
        _refuse_inside(axis_name)
        refuse_overwritten(params)
        specs = _specs.lying(params, mesh, axis_name) if param_specs is None else param_specs
        return init_opt_state(params, tx, mesh, axis_name=axis_name, param_specs=specs)[0]

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, PyTree]:
        _refuse_inside(axis_name)
        refuse_overwritten(updates)
        refusals.refuse_unmapped(state, mesh, axis_name)
        refuse_whole(state, mesh, axis_name)
        pins(state)
        refuse_lookahead(state, params, updates)
        refuse_other_gradient(updates, params)
        # The weight is split over the workers; all other arguments go to each of them.
        weight, reads = extra.pop("weight", None), list[bool]()
        if weight is not None and jnp.shape(weight) != (workers,):
            raise ValueError(f"weight must be one number for each worker, [{workers}], got {list(jnp.shape(weight))}")
        weights = {} if weight is None else {"weight": weight}
        by_worker = jax.tree_util.tree_map_with_path(
            lambda path, leaf: _spec(path, leaf, axis_name, workers), updates, is_leaf=is_per_device
        )
        specs = per_device.state_specs(state, axis_name=axis_name)

        def own(gradient: Any) -> Any:
            if is_per_device(gradient):
                return per_device.lower(gradient)
            # A worker's part of the gradient of the mean over all batches is 1/N of the gradient of its own mean.
            return _compat.own_part(gradient, axis_name) * lax.axis_size(axis_name)

        def one_worker(updates: PyTree, state: PyTree, params: PyTree | None, weights: Any) -> tuple[PyTree, PyTree]:
            own_gradients = jax.tree.map(own, updates, is_leaf=is_per_device)
            given = with_context({**weights, **extra}, weight_read=lambda: reads.append(True))
            moved, new = updated(tx, own_gradients, state, params, given, axis_name)
            refusals.refuse_unread(weight, reads)
            refusals.refuse_updates(moved, own_gradients if params is None else params, axis_name)
            refusals.refuse_own_state(new, state, axis_name)
            return moved, new

        in_specs = (by_worker, specs, everywhere, PartitionSpec(axis_name))
        mapped = _specs.mapped(one_worker, mesh, axis_name, in_specs, (everywhere, specs), check_vma=check_vma)
        return mapped(updates, state, params, weights)

    return optax.GradientTransformationExtraArgs(MappedInit(init), update)


def _refuse_inside(axis_name: AxisName) -> None:
    if any(_compat.axis_size(name) is not None for name in _specs.names_of(axis_name)):
        raise ValueError(
            f"gradcomp_jax.unreduced maps its chain over {axis_name!r} by itself, and here that axis is mapped already: inside"
            " jax.shard_map, jax.pmap and make_train_step use the chain without it"
        )


def _spec(path: Any, leaf: Any, axis_name: AxisName, workers: int) -> Any:
    """Returns the spec by which one gradient lies over the workers."""
    if per_device.is_lifted(leaf):
        if jnp.shape(leaf.value)[:1] != (workers,):
            raise ValueError(
                f"the gradient{f' of {path_name(path)!r}' if path else ''} is marked as each worker's own, and its shape is"
                f" {list(jnp.shape(leaf.value))}: {workers} workers have [{workers}, ...], one gradient each; add up those of"
                " several micro-batches before"
            )
        return per_device.state_specs(leaf, axis_name=axis_name)
    if _compat.is_unreduced(leaf, axis_name):
        return PartitionSpec(unreduced=set(_specs.names_of(axis_name)))
    raise ValueError(
        f"the gradient{f' of {path_name(path)!r}' if path else ''} is added up over {axis_name!r} already, by a dense"
        " all-reduce: take gradients from gradcomp_jax.local_value_and_grad(loss, axis_name=..., mesh=mesh), or, on a mesh of"
        f" Explicit type, with respect to jax.reshard(params, jax.P(reduced={{{axis_name!r}}})). What adds gradients up over"
        " batches goes inside gradcomp_jax.unreduced: gradcomp_jax.accumulate instead of optax.MultiSteps"
    )
