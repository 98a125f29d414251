"""Makes a fresh train state, or only an optimizer's state, on a mesh."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gradcomp_jax import _arguments, _compat, _specs, per_device
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.core.overwritten import refuse_misplaced, refuse_own_dtype, trained
from gradcomp_jax.per_device import is_per_device
from gradcomp_jax.training import refusals
from gradcomp_jax.training.applied import placed
from gradcomp_jax.training.order import check_order, refuse_lookahead
from gradcomp_jax.training.state import (
    CopiedTrainState,
    TrainState,
    check_axis,
    lift_replicas,
    manual_specs,
    model_field,
    state_shardings,
    state_specs,
)


@_arguments.checked
def init_state(
    params: PyTree,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: AxisName = "data",
    param_specs: PyTree | None = None,
    replicas: bool = False,
    model_state: PyTree = (),
    own_model_state: bool = False,
    param_copy: Any = None,
) -> Any:
    """Returns a fresh train state on a mesh: parameters where their specs say, per-device state split along the axis.

    Example:
        >>> tx = optax.chain(gc.topk_sgd(axis_name="data"), optax.sgd(0.1))
        >>> state = gc.init_state(params, tx, mesh)
        >>> int(state.step), state.params["kernel"].shape
        (0, (256, 256))

    Args:
        params: any tree of arrays: plain, ``flax.linen`` variables or ``flax.nnx`` state; whole, even if they are to be
            sharded. Or a state with ``replace``, ``step``, ``params`` and ``opt_state``, such as flax's ``TrainState``: a state
            of the same type is returned, with a new ``opt_state``, and ``model_state`` (or ``batch_stats``) if it has that.
            Its other parts, such as an average of the parameters, are copied and replicated, unless they are on the mesh.
            With Flax's collection ``_overwrite_with_gradient`` beside ``"params"``, ``opt_state`` is for ``"params"`` only.
        tx: an optax transformation, with or without an exchange in it.
        mesh: a mesh with this axis, of Auto or Explicit axis type. Further axes are left to the compiler.
        axis_name: the axis of the workers.
        param_specs: the parameters' ``PartitionSpec`` on the mesh, a tree or a prefix of it; replicated by default.
        replicas: whether every worker has its own parameters, equal at first, as the methods of
            :mod:`gradcomp_jax.replicas` need them. Parameters and the optimizer's state are then :class:`PerDevice`, except
            the state of an exchange or such a method, which marks what differs itself. :func:`make_train_step` sees this
            from the state; :func:`gradcomp_jax.consolidate` makes one set of parameters again.
        model_state: what the model itself changes, such as the statistics of batch normalisation.
        own_model_state: whether every worker keeps its own model state; otherwise a step averages it over the workers.
            Replicas always keep their own.
        param_copy: a floating dtype in which every device keeps a whole copy of the parameters that lie along the axis.
            :func:`make_train_step` gathers the differences from it with its ``param_compressor``; none by default.

    Returns:
        A :class:`TrainState`, with the field ``param_copy`` if that is asked for; or a state of the type of ``params``.

    Raises:
        ValueError: if the mesh has no such axis, replicas are asked to lie along it, no parameter has an entry, or a
            ``param_copy`` is asked for although no parameter lies along the axis, or for another type of state.
    """
    if all(hasattr(params, name) for name in ("replace", "params", "opt_state")):
        if param_copy is not None:
            raise ValueError(f"a {type(params).__name__} has no place for param_copy: give init_state the parameters")
        field = model_field(params)
        inside = init_state(
            params.params,
            tx,
            mesh,
            axis_name=axis_name,
            param_specs=param_specs,
            replicas=replicas,
            model_state=getattr(params, field) if field else (),
            own_model_state=own_model_state,
        )
        more = {field: inside.model_state} if field else {}
        fields = {"step": inside.step, "params": inside.params, "opt_state": inside.opt_state, **more}
        return placed(params, fields, lambda x: jnp.array(x) if _is_on(x, mesh) else _on(mesh, jnp.array(x)))
    check_axis(mesh, axis_name)
    if replicas and param_specs is not None:
        raise ValueError("replicas=True gives every worker whole parameters: leave param_specs out")
    refusals.refuse_no_arrays(params)
    refuse_misplaced(params)
    refuse_own_dtype(params)
    every = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
    if every and all(0 in shape for shape in every):
        raise ValueError(
            f"all {len(every)} parameters are without entries, such as one of shape {every[0]}: there is nothing to train;"
            " pass the parameters of a model"
        )
    places = _specs.by_leaf(param_specs, params)
    copies = _copies(params, places, mesh, axis_name, param_copy)
    leaves = [_on(mesh, p, spec) for p, spec in zip(jax.tree.leaves(params), places, strict=True)]
    params = jax.tree.unflatten(jax.tree.structure(params), leaves)
    model_state = jax.tree.map(lambda x: _on(mesh, x), model_state)

    def start(params: PyTree, model_state: PyTree, copies: PyTree) -> Any:
        if replicas:
            params = _compat.varying(params, axis_name)
        if replicas or own_model_state:
            model_state = per_device.lift(_compat.varying(model_state, axis_name))
        parts = (jnp.zeros((), jnp.int32), params, tx.init(trained(params)), model_state)
        state = TrainState(*parts) if copies is None else CopiedTrainState(*parts, copies)
        return lift_replicas(state) if replicas else state

    names = set(_specs.names_of(axis_name))
    in_specs = manual_specs(param_specs, params, axis_name)
    everywhere = PartitionSpec()
    args, args_specs = (params, model_state, copies), (in_specs, everywhere, everywhere)
    with refusals.update_explained(axis_name):
        shapes = _compat.local_shapes(start, *args, in_specs=args_specs, mesh=mesh, axis_names=names)
    specs = state_specs(shapes, axis_name=axis_name, param_specs=None if replicas else in_specs)
    mapped = _specs.mapped(start, mesh, axis_name, args_specs, specs)

    def place(*args: PyTree) -> Any:
        state = mapped(*args)
        if param_specs is None or AxisType.Explicit in mesh.axis_types:
            return state
        # Zeros have no sharding, so moments would lie whole on every device until the first step.
        places = state_shardings(state, mesh, axis_name=axis_name, param_specs=param_specs)
        # Per-device state already lies where ``shard_map`` has put it.
        return jax.tree.map(
            lambda leaf, at: leaf if is_per_device(leaf) else lax.with_sharding_constraint(leaf, at),
            state,
            places,
            is_leaf=is_per_device,
        )

    # It goes through the same shard_map as a train step's state, so that the first and the second step are one program. The
    # program copies what it is given: the train step donates its state and must not take the caller's parameters.
    state = jax.jit(place)(*args)
    check_order(state.opt_state, tx, replicas=replicas)
    refuse_lookahead(state.opt_state, params)
    return state


@_arguments.checked
def init_opt_state(
    params: PyTree,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: AxisName = "data",
    param_specs: PyTree | None = None,
) -> tuple[PyTree, PyTree]:
    """Returns the optimizer's fresh state and its specs, for your own ``jax.shard_map``.

    ``opt_state, specs = gc.init_opt_state(params, tx, mesh)``: ``specs`` are the ``in_specs`` and ``out_specs`` of the
    state.

    Example:
        >>> tx = optax.chain(gc.topk_sgd(axis_name="data"), optax.sgd(0.1))
        >>> opt_state, specs = gc.init_opt_state(params, tx, mesh)
        >>> jax.tree.structure(opt_state) == jax.tree.structure(specs)
        True

    Args:
        params: as for :func:`init_state`; not donated and not moved.
        tx: as for :func:`init_state`.
        mesh: as for :func:`init_state`.
        axis_name: as for :func:`init_state`.
        param_specs: as for :func:`init_state`.

    Returns:
        The state, whose per-device leaves are split along the axis, and a tree of the same structure with their
        ``PartitionSpec``.

    Raises:
        ValueError: if the mesh has no such axis.
    """
    state = init_state(params, tx, mesh, axis_name=axis_name, param_specs=param_specs)
    manual = None if param_specs is None else manual_specs(param_specs, params, axis_name)
    return state.opt_state, state_specs(state, axis_name=axis_name, param_specs=manual).opt_state


@dataclasses.dataclass(frozen=True)
class MappedInit:
    """Marks the ``init`` of a chain that maps itself over the workers, such as that of :func:`gradcomp_jax.unreduced`."""

    init: Callable[[PyTree], PyTree]

    def __call__(self, params: PyTree) -> PyTree:
        """Returns the state of all workers."""
        return self.init(params)


def _copies(params: PyTree, places: Any, mesh: Mesh, axis_name: AxisName, dtype: Any) -> PyTree:
    """Returns whole copies of the parameters that lie along the axis, ``()`` for the others; ``None`` for no copies."""
    if dtype is None:
        return None
    leaves, treedef = jax.tree.flatten(params)
    names = _specs.names_of(axis_name)
    along = [any(_specs.sharded_dim(s, n) is not None for n in names) for s in places]
    if not any(along):
        raise ValueError("param_copy is for parameters that lie along the axis of the workers: give their param_specs")

    def copy(leaf: Any) -> Any:
        kind = jnp.result_type(leaf)
        return _on(mesh, leaf, dtype=dtype if jnp.issubdtype(kind, jnp.floating) else kind)

    return jax.tree.unflatten(treedef, [copy(p) if is_along else () for p, is_along in zip(leaves, along, strict=True)])


def _on(mesh: Mesh, x: Any, spec: PartitionSpec | None = None, dtype: Any = None) -> jax.Array:
    if not isinstance(x, jax.Array | np.ndarray) or dtype not in (None, x.dtype):
        x = jnp.array(x, dtype)
    elif isinstance(x, np.ndarray):
        # JAX may read the caller's memory after this, when the caller has changed it.
        x = np.array(x)
    return jax.device_put(x, NamedSharding(mesh, spec or PartitionSpec()))


def _is_on(x: Any, mesh: Mesh) -> bool:
    at = getattr(x, "sharding", None)
    return isinstance(at, NamedSharding) and at.mesh == mesh
