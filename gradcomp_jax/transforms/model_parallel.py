"""An exchange of parameters that a model axis shards: each device sends its shard's rows, and nothing is gathered."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from gradcomp_jax import _arguments, _compat, _specs
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.core.changed import of_state
from gradcomp_jax.per_device import state_specs
from gradcomp_jax.transforms import worker_shards
from gradcomp_jax.transforms.worker_shards import ShardState, shards_of


@_arguments.checked
def model_parallel(
    exchange: optax.GradientTransformation, *, axis_name: AxisName, model_axis_name: str, param_specs: PyTree
) -> optax.GradientTransformationExtraArgs:
    r"""Exchanges each device's shard of a model whose parameters lie along a model axis.

    Rows of a sharded tensor would make the compiler gather it. Here rows are made of the shard that a device
    has: the devices along ``model_axis_name`` are one worker, each with its shard of a tensor and its shard of the
    exchange. Tensors that the axis does not divide are equal on all these devices; each sends 1/n of them, and an
    all-gather along the model axis puts the update together.

    The model axis may be left to the compiler (``jax.shard_map(..., axis_names={"data"})``, which is what
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
        model_axis_name: the axis that parameters are sharded along.
        param_specs: the parameters' ``PartitionSpec``, a tree or a prefix of it.

    Returns:
        A transformation of per-device gradients. Its update lies as the parameters do, equal on every worker.

    Raises:
        ValueError: if the two axes are the same, or a spec shards a dimension along several axes.
        NameError: when traced where the mesh has no such axis.

    References:
        Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053, section 3 (tensor parallelism).
    """
    inside = optax.with_extra_args_support(exchange)
    axes = worker_shards.axes_of(axis_name, "model_axis_name", model_axis_name)

    def init_shard(params: PyTree) -> ShardState:
        return worker_shards.init(inside, params, shards_of(param_specs, params, model_axis_name), **axes)

    def update_shard(updates: PyTree, state: ShardState, params: PyTree | None, extra: Any) -> Any:
        every = shards_of(param_specs, updates, model_axis_name)
        index = _compat.axis_index(model_axis_name)
        mine = [shards.own(g, index) for g, shards in zip(jax.tree.leaves(updates), every, strict=True)]
        return worker_shards.update(inside, mine, every, updates, state, params, **axes, extra=extra)

    def specs_of(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda s: _specs.only(s, (model_axis_name,)), _specs.like(param_specs, tree))

    def init(params: PyTree) -> ShardState:
        if not _compat.is_auto(model_axis_name):
            return init_shard(params)
        mapping = {"axis_names": {model_axis_name}, "check_vma": _compat.tracks_varying(axis_name)}
        shapes = _compat.local_shapes(init_shard, params, in_specs=(specs_of(params),), **mapping)
        return _nested(init_shard, (params,), (specs_of(params),), _state_specs(shapes), mapping)

    def update(
        updates: PyTree, state: ShardState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, ShardState]:
        if not _compat.is_auto(model_axis_name):
            return update_shard(updates, state, params, extra)
        mapping = {"axis_names": {model_axis_name}, "check_vma": _compat.tracks_varying(axis_name)}
        places, kept = specs_of(updates), _state_specs(state)
        everywhere = jax.sharding.PartitionSpec()
        of_params = None if params is None else places
        # Values that are not arrays (names, functions) do not go through the mapping.
        kinds = (jax.Array, np.ndarray, float)
        arrays = {k: v for k, v in extra.items() if all(isinstance(leaf, kinds) for leaf in jax.tree.leaves(v))}
        static = {name: value for name, value in extra.items() if name not in arrays}

        def local(updates: PyTree, state: Any, params: PyTree | None, arrays: Any) -> Any:
            return update_shard(updates, state, params, {**arrays, **static})

        args, in_specs = (updates, state, params, arrays), (places, kept, of_params, everywhere)
        return _nested(local, args, in_specs, (places, kept), mapping)

    def _state_specs(state: PyTree) -> PyTree:
        return state_specs(state, axis_name=model_axis_name)

    return of_state(ShardState, init, update)


def _nested(f: Callable[..., Any], args: Any, in_specs: Any, out_specs: Any, mapping: Any) -> Any:
    """Calls ``f`` in a ``shard_map`` inside another, over an axis that the outer one leaves to the compiler."""
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, **mapping)(*args)
