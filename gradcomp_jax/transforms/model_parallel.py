"""An exchange of parameters that a model axis shards: each device sends its shard's rows, and nothing is gathered."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec

from gradcomp_jax import _arguments, _compat, _specs
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.core.changed import of_state
from gradcomp_jax.core.shards import Shards
from gradcomp_jax.per_device import state_specs
from gradcomp_jax.transforms import worker_shards
from gradcomp_jax.transforms.worker_shards import ShardState


@_arguments.checked
def model_parallel(
    exchange: optax.GradientTransformation, *, axis_name: AxisName, model_axis_name: AxisName, param_specs: PyTree
) -> optax.GradientTransformationExtraArgs:
    r"""Exchanges each device's shard of a model whose parameters lie along model axes.

    Rows of a sharded tensor would make the compiler gather it. Here rows are made of the shard that a device
    has: the devices along the model axes are one worker, each with its shard of a tensor and its shard of the
    exchange. Tensors that an axis does not divide are equal on all its devices; each of n sends 1/n of them, and an
    all-gather along that axis puts the update together.

    The model axes may be left to the compiler (``jax.shard_map(..., axis_names={"data"})``, which is what
    :func:`gradcomp_jax.make_train_step` does with every axis of the mesh that is not ``axis_name``), or be manual, where
    gradients and parameters are the device's shards.

    State: that of ``exchange``, with every array per device, for each device's shard.

    Example:
        >>> specs = {"kernel": jax.P(None, "model"), "bias": jax.P()}
        >>> method = gc.dgc(axis_name="data")
        >>> exchange = gc.model_parallel(method, axis_name="data", model_axis_name="model", param_specs=specs)
        >>> grid = jax.make_mesh((4, 2), ("data", "model"))
        >>> state = gc.init_state(params, optax.chain(exchange, optax.sgd(0.1)), grid, param_specs=specs)

    Args:
        exchange: a method or :func:`gradcomp_jax.exchange` over ``axis_name``, or a chain with one in it.
        axis_name: the axis that gradients are averaged over.
        model_axis_name: the axis that parameters are sharded along, or a tuple of several, such as ``("fsdp", "tensor")``. The
            order in the tuple has no effect: the mesh's counts.
        param_specs: the parameters' ``PartitionSpec``, a tree or a prefix of it.

    Returns:
        A transformation of per-device gradients. Its update lies as the parameters do, equal on every worker.

    Raises:
        ValueError: if the two axes are the same, a spec shards a dimension along ``axis_name`` and a model axis, or
            ``exchange`` is another ``model_parallel``; when traced, for a spec along an axis that is left to the compiler and
            not named, which would be gathered.
        NameError: when traced where the mesh has no such axis.

    References:
        Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053, section 3 (tensor parallelism).
    """
    if isinstance(exchange.init, _Init):
        both = (*_specs.names_of(model_axis_name), *_specs.names_of(exchange.init.model_axis_name))
        raise ValueError(
            f"a gradcomp_jax.model_parallel is around another: name the axes of both in one, as in model_axis_name={both}"
        )
    inside = optax.with_extra_args_support(exchange)
    worker_shards.axes_of(axis_name, "model_axis_name", model_axis_name)

    def axes() -> dict[str, Any]:
        return {"axis_name": axis_name, "inner_axis_name": _one(_in_mesh_order(model_axis_name))}

    def init_shard(params: PyTree) -> ShardState:
        every, names = _divided(param_specs, params, axis_name, model_axis_name), _in_mesh_order(model_axis_name)
        return worker_shards.init(inside, params, every, **axes(), division=_division(param_specs, params, names))

    def update_shard(updates: PyTree, state: ShardState, params: PyTree | None, extra: Any) -> Any:
        every = _divided(param_specs, updates, axis_name, model_axis_name)
        mine = worker_shards.own(updates, every, model_axis_name)
        return worker_shards.update(inside, mine, every, updates, state, params, **axes(), extra=extra)

    def specs_of(tree: PyTree, names: tuple[Any, ...]) -> PyTree:
        return jax.tree.map(lambda s: _specs.only(s, names), _specs.like(param_specs, tree))

    def init(params: PyTree) -> ShardState:
        if not (names := _left_to_compiler(param_specs, params, axis_name, model_axis_name)):
            return init_shard(params)
        mapping = {"axis_names": {*names}, "check_vma": _compat.tracks_varying(axis_name)}
        places = (specs_of(params, names),)
        shapes = _compat.local_shapes(init_shard, params, in_specs=places, **mapping)
        return _nested(init_shard, (params,), places, state_specs(shapes, axis_name=names), mapping)

    def update(
        updates: PyTree, state: ShardState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, ShardState]:
        if not (names := _left_to_compiler(param_specs, updates, axis_name, model_axis_name)):
            return update_shard(updates, state, params, extra)
        mapping = {"axis_names": {*names}, "check_vma": _compat.tracks_varying(axis_name)}
        places, kept = specs_of(updates, names), state_specs(state, axis_name=names)
        of_params = None if params is None else places
        # Values that are not arrays (names, functions) do not go through the mapping.
        kinds = (jax.Array, np.ndarray, float)
        arrays = {k: v for k, v in extra.items() if all(isinstance(leaf, kinds) for leaf in jax.tree.leaves(v))}
        static = {name: value for name, value in extra.items() if name not in arrays}

        def local(updates: PyTree, state: Any, params: PyTree | None, arrays: Any) -> Any:
            return update_shard(updates, state, params, {**arrays, **static})

        args, in_specs = (updates, state, params, arrays), (places, kept, of_params, PartitionSpec())
        return _nested(local, args, in_specs, (places, kept), mapping)

    made = of_state(ShardState, init, update)
    return made._replace(init=_Init(made.init, model_axis_name))


@dataclasses.dataclass(frozen=True)
class _Init:
    """Marks the ``init`` of a ``model_parallel``, so that another around it is seen."""

    init: Callable[[PyTree], PyTree]
    model_axis_name: AxisName

    def __call__(self, params: PyTree) -> PyTree:
        return self.init(params)


def _one(names: tuple[Any, ...]) -> AxisName:
    return names if len(names) > 1 else names[0]


def _in_mesh_order(axis_name: AxisName) -> tuple[Any, ...]:
    """Returns axes in the order of the mesh, in which their devices lie; without a mesh in the order given."""
    names, of_mesh = _specs.names_of(axis_name), jax.sharding.get_abstract_mesh().axis_names
    return tuple(sorted(names, key=of_mesh.index)) if {*names} <= {*of_mesh} else names


def _left_to_compiler(specs: PyTree, tree: PyTree, axis_name: AxisName, model_axis_name: AxisName) -> tuple[Any, ...]:
    """Returns the model axes that are not mapped here, and refuses specs along other such axes."""
    named, mesh = {*_specs.names_of(axis_name), *_specs.names_of(model_axis_name)}, jax.sharding.get_abstract_mesh()
    every = _specs.by_leaf(specs, tree)
    along = {name for spec in every for entry in spec for name in _specs.names_of(entry) if name is not None}
    missing = {name for name in along - named if _compat.is_auto(name) and mesh.shape[name] > 1}
    if missing:
        wanted = tuple(name for name in mesh.axis_names if name in missing | {*_specs.names_of(model_axis_name)})
        raise ValueError(
            f"param_specs lay tensors along {', '.join(map(repr, sorted(missing)))}, which the compiler would gather them over:"
            f" name every axis that parameters lie along, as in gradcomp_jax.model_parallel(..., model_axis_name={wanted})"
        )
    return tuple(name for name in _in_mesh_order(model_axis_name) if _compat.is_auto(name))


def _dims(spec: PartitionSpec, names: tuple[Any, ...]) -> list[int | None]:
    """Returns for each axis the dimension that lies along it."""
    return [next((dim for dim, entry in enumerate(spec) if name in _specs.names_of(entry)), None) for name in names]


def _divided(specs: PyTree, tree: PyTree, axis_name: AxisName, model_axis_name: AxisName) -> list[Shards]:
    """Returns how every leaf is divided: by its spec, or among the devices along the axes that its spec leaves out."""
    names = _in_mesh_order(model_axis_name)
    workers = {name for name in _specs.names_of(axis_name) if _compat.axis_size(name) != 1}

    def shards(spec: PartitionSpec) -> Shards:
        for entry in spec:
            if workers & {*_specs.names_of(entry)} and {*names} & {*_specs.names_of(entry)}:
                raise ValueError(
                    f"the spec {spec} lays one dimension along {entry}, of workers and of a model: shard each dimension along"
                    " one axis, or along model axes alone"
                )
        dims = _dims(spec, names)
        rest = tuple(name for name, dim in zip(names, dims, strict=True) if dim is None)
        return Shards(worker_shards.devices_along(rest or names), None if rest else dims[0], _one(rest or names))

    return [shards(spec) for spec in _specs.by_leaf(specs, tree)]


def _division(specs: PyTree, tree: PyTree, names: tuple[Any, ...]) -> dict[str, Any]:
    """Returns what checkpoints compare. Axes of one device divide nothing."""
    names = tuple(name for name in names if _compat.axis_size(name) != 1) or names[:1]
    devices, dims = (
        list(map(worker_shards.devices_along, names)),
        [_dims(s, names) for s in _specs.by_leaf(specs, tree)],
    )
    if len(names) == 1:
        return {"devices": devices[0], "sharded_dims": [dim for (dim,) in dims]}
    return {"devices": devices, "sharded_dims": dims}


def _nested(f: Callable[..., Any], args: Any, in_specs: Any, out_specs: Any, mapping: Any) -> Any:
    """Calls ``f`` in a ``shard_map`` inside another, over an axis that the outer one leaves to the compiler."""
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, **mapping)(*args)
