"""An exchange over slow links, between workers that are each several devices joined by fast links."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _arguments
from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.collectives import fused
from gradcomp_jax.core.changed import of_state
from gradcomp_jax.core.context import context_of
from gradcomp_jax.core.refusals import refuse_beyond_float32, refuse_reduced
from gradcomp_jax.transforms import worker_shards
from gradcomp_jax.transforms.worker_shards import ShardState, in_buckets, shards_of


@_arguments.checked
def hierarchical(
    exchange: optax.GradientTransformation,
    *,
    axis_name: AxisName,
    inner_axis_name: AxisName,
    param_specs: PyTree | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages densely over a fast axis and compressed over a slow one, each device with its part of the data.

    The n devices along ``inner_axis_name`` (a node, a TPU slice) are one worker. Their gradients are averaged by a dense
    reduce-scatter, which leaves each with 1/n of every tensor; that shard goes through ``exchange`` over ``axis_name``;
    an all-gather inside the worker puts the update together. So 1/n of the payload leaves each device, n links carry it
    at once, and memories are of the shard alone.

    The mean gradient of a worker is exchanged: local clipping, momentum and error feedback in ``exchange`` are those of
    workers, not of devices. The exchange is told only that the norm of a worker's gradient and the decision to skip a step
    are those of all its devices. So every method works here unchanged, with Adam's moments and low-rank starts.

    A tensor is divided along the rows of the matrix of its last dimension against all others, so the shard of a matrix is a
    matrix; where the devices do not divide the rows, zeros fill them up. In the exchange, a scale, a size or a selection is
    that of the shard, not of the tensor. The part of an update that is beyond float16's range is lost.

    **Sharded parameters (FSDP, ZeRO).** Tensors whose spec in ``param_specs`` lays a dimension along ``inner_axis_name`` are
    divided along that dimension, and their updates stay where they are: whole gradients in, the device's shard of the update
    out, and no all-gather. The parameters that ``init`` and ``update`` see are then the device's shards.

    State: that of ``exchange``, with every array per device. Give both axes wherever the axis of the workers is asked
    for: ``gc.init_state(..., axis_name=("slices", "chips"))``, the outer one first; ``old`` and ``new`` of
    :func:`gradcomp_jax.resize_workers` count outer workers.

    Example:
        >>> nodes = jax.make_mesh((4, 2), ("slices", "chips"))
        >>> method = gc.dgc(axis_name="slices", density=0.001)
        >>> tx = optax.chain(gc.hierarchical(method, axis_name="slices", inner_axis_name="chips"), optax.sgd(0.1))
        >>> state = gc.init_state(params, tx, nodes, axis_name=("slices", "chips"))

    Args:
        exchange: a method or :func:`gradcomp_jax.exchange` over ``axis_name``, or a chain with one in it.
        axis_name: the slow axis, between workers.
        inner_axis_name: the fast axis, within a worker.
        param_specs: the parameters' ``PartitionSpec``, a tree or a prefix of it; none is sharded by default.

    Returns:
        A transformation of per-device gradients. Its update is that of ``exchange``, equal on every device, or the device's
        shard of it.

    Raises:
        ValueError: if the two axes are the same; when traced, if the gradients are already reduced over one of them, or
            a sharded dimension does not divide.
        NameError: when traced outside one of the axes.

    References:
        Jia et al., 2018, https://arxiv.org/abs/1807.11205, section 3 (hierarchical all-reduce). Rajbhandari et al., 2020,
        https://arxiv.org/abs/1910.02054, section 5 (sharded parameters).
    """
    inside = optax.with_extra_args_support(exchange)
    axes = worker_shards.axes_of(axis_name, "inner_axis_name", inner_axis_name)

    def init(params: PyTree) -> ShardState:
        return worker_shards.init(inside, params, shards_of(param_specs, params, inner_axis_name), **axes)

    def update(
        updates: PyTree, state: ShardState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, ShardState]:
        refuse_beyond_float32(updates)
        refuse_reduced(updates, inner_axis_name)
        every = shards_of(param_specs, updates, inner_axis_name)
        stacks = []
        for (path, g), shards in zip(jax.tree_util.tree_leaves_with_path(updates), every, strict=True):
            shards.check(path_name(path), g.shape)
            stacks.append(shards.stack(g.astype(jnp.float32)))
        # The mean over the worker's devices is float32, so that only the exchange rounds it.
        summed = in_buckets(fused.reduce_scatter, stacks, inner_axis_name, context_of(extra))
        mine = [total / shards.count for total, shards in zip(summed, every, strict=True)]
        return worker_shards.update(inside, mine, every, updates, state, params, **axes, extra=extra)

    return of_state(ShardState, init, update)
