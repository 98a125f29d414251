"""Who takes part in an exchange: a weight for each worker, 0 for one that is absent.

The weight goes around the exchange. An absent worker gives the exchange a gradient of zeros and a memory of zeros, and with any
code its payload decodes to zeros. What the exchange leaves in that memory is added to the worker's own, which was set aside.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _arguments, _compat, _specs, kernels
from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.collectives import psum
from gradcomp_jax.core.context import context_of, with_context
from gradcomp_jax.core.exchange import ExchangeState
from gradcomp_jax.core.placeholders import is_placeholder
from gradcomp_jax.core.refusals import refuse_beyond_float32, refuse_reduced
from gradcomp_jax.core.step_keys import StepKeys
from gradcomp_jax.memory import narrow
from gradcomp_jax.per_device import PerDevice, is_per_device, nodes_within
from gradcomp_jax.transforms.worker_shards import ShardState


@_arguments.checked
def weighted(
    method: optax.GradientTransformation, *, axis_name: AxisName | None, keep_absent: bool = True
) -> optax.GradientTransformationExtraArgs:
    r"""Averages with a weight for each worker: ``update(gradient, state, params, weight=...)``.

    With the weights :math:`w_i \ge 0` of N workers, the method is given :math:`N w_i g^i / \sum_j w_j`, whose mean over the
    workers is the weighted mean of the :math:`g^i`. The weight is, for example, the number of examples that a worker has seen;
    it is 0 for an absent worker. Without ``weight=`` all workers count alike, and the result is the method's own.

    **Absent workers.** Where :math:`w_i = 0` the worker's gradient is not read; it may be NaN. Its payload decodes to
    zeros, and its memory stays as it was, bit by bit: neither decayed nor sent, until the worker is back. It still owns its
    rows in two phases, and what the collective or the range of float16 gives back to it is added to its memory. EF21's
    estimate of it stays in the mean as it was. The update arrives at every worker, absent ones too. An absent worker still
    runs the program: where a process has ended, the number of workers changes (:func:`gradcomp_jax.resize_workers`).

    Law: the method's, of the weighted gradient. For residuals, in every step: the mean of all residuals, owners' included, plus
    the update equals the mean of the residuals before the step plus the weighted mean gradient.

    Where all weights are 0, or one of them is negative, a NaN or an infinity, all workers skip the exchange, as they do for a
    bad gradient: the update is zero, memories stay, and ``skipped`` goes up.

    Clipping, weight decay or a fixed range inside the method sees the weighted gradient, which is zero on an absent worker.
    A decay inside is added on every worker, absent or not, so its mean is complete. In a vote (:func:`gradcomp_jax.sign_sgd`)
    all weights but 0 count alike. 1-bit Adam sends a momentum that all workers know, so an absent worker sends it too. The
    weighted gradient is float32, also of a narrower gradient: it may be beyond float16's range where the mean is not. Updates
    have the gradients' dtypes.

    State: the method's. Wire: the method's, and one float32 in an all-reduce before it. Memories are set aside while it runs,
    which takes up to two more copies of them. Inside :func:`gradcomp_jax.hierarchical` the weights of a worker's devices are
    added up.

    Example:
        >>> tx = optax.chain(gc.weighted(gc.dgc(axis_name="data"), axis_name="data"), optax.sgd(0.1))
        >>> step = gc.make_train_step(loss, tx, mesh, weight=lambda batch: len(batch))  # or your own update(..., weight=...)

    Args:
        method: a method or :func:`gradcomp_jax.exchange`, or a chain with one in it.
        axis_name: the method's axis; ``None`` for one worker.
        keep_absent: whether the memory of an absent worker stays as it was. If false, the worker takes part with a gradient of
            zero: its memory decays and is sent from. The law still holds, the mean contains old values of that worker, and no
            memory is set aside. Where no weight is ever 0 that saves the copies.

    Returns:
        A transformation with the updates of ``method``, whose ``update`` takes ``weight=``, a scalar on each worker.

    Raises:
        ValueError: from ``init``, if there is no exchange inside, or an exchange whose workers are several devices, or a method
            whose replicas differ: put ``weighted`` inside those. When traced, for a weight that is not one number on each
            worker, and gradients that are already reduced.

    References:
        McMahan et al., 2017, https://arxiv.org/abs/1602.05629, algorithm 1 (weights). Li and Li, 2023, Fed-EF,
        https://arxiv.org/abs/2211.14292 (residuals of absent workers stay); Fatkhullin et al., 2021,
        https://arxiv.org/abs/2110.03294, EF21-PP (so do estimates).
    """
    inside = optax.with_extra_args_support(method)

    def init(params: PyTree) -> Any:
        state = inside.init(params)
        if not is_placeholder(params):
            _check(state)
        return state

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, *, weight: Any = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        if weight is None:
            return inside.update(updates, state, params, **extra)
        if _compat.axis_size(axis_name) is None:
            raise NameError(f"the axis {axis_name!r} is not bound here: give weighted the axis_name of its method")
        refuse_beyond_float32(updates)
        refuse_reduced(updates, axis_name)
        context_of(extra).weight_read()
        within = context_of(extra).inner_axis_name
        share = share_of(psum([one_number(weight, axis_name)], within)[0], axis_name)
        mine = jax.tree.map(lambda g: share.of(g) if jnp.issubdtype(g.dtype, jnp.floating) else g, updates)
        dtypes = {path_name(path): g.dtype for path, g in jax.tree_util.tree_leaves_with_path(updates)}
        context = with_context(extra, weighted=_specs.names_of(axis_name), dtypes=dtypes)
        if not keep_absent:
            return _as_before(inside.update(mine, state, params, **context), updates, state)
        emptied = jax.tree.map(lambda node: _emptied(node, share.absent), state, is_leaf=_is_exchange)
        moved, after = _as_before(inside.update(mine, emptied, params, **context), updates, state)

        def back(before: Any, now: Any) -> Any:
            if not _is_exchange(before):
                return now
            worker = _compat.axis_index(axis_name)
            return now._replace(memory=_back(before, now, share.absent, StepKeys.of(0, before.step, worker, within)))

        return moved, jax.tree.map(back, state, after, is_leaf=_is_exchange)

    return optax.GradientTransformationExtraArgs(init, update)


class Share(NamedTuple):
    """Holds a worker's share of a weighted mean.

    Attributes:
        factor: float32 scalar, N times the weight over the sum of all; NaN where there is no mean.
        absent: boolean scalar, whether others take part and this worker does not.
    """

    factor: Array
    absent: Array

    def of(self, x: Array) -> Array:
        """Returns a worker's value, scaled so that the mean over all workers is the weighted mean, in float32.

        It may be N times as large as any worker's, and so beyond float16's range where the mean is not.
        """
        return jnp.where(self.absent, 0.0, x.astype(jnp.float32) * self.factor)


def share_of(weight: Array, axis_name: AxisName | None) -> Share:
    """Returns the share of a worker with this weight, a float32 scalar; one scalar is summed over the axis."""
    count = _compat.axis_size(axis_name) or 1
    (total,) = psum([weight], axis_name)
    there = (total > 0) & jnp.isfinite(total)
    # The product comes first: with equal weights it is rounded as their sum is, and the factor is 1.
    factor = jnp.where(there & (weight >= 0), weight * count / total, jnp.nan)
    return Share(factor, there & (weight == 0))


def one_number(weight: Any, axis_name: AxisName | None) -> Array:
    """Returns a worker's weight as a float32 scalar.

    Raises:
        ValueError: for anything but one real number.
    """
    weight = jnp.asarray(weight)
    if weight.size != 1 or not (
        jnp.issubdtype(weight.dtype, jnp.floating) or jnp.issubdtype(weight.dtype, jnp.integer)
    ):
        raise ValueError(
            f"weight must be one number on each worker, such as the examples that it has seen, got"
            f" {weight.dtype}{list(weight.shape)}; inside jax.shard_map split the workers' weights over the axis"
        )
    return _compat.varying(weight.reshape(()).astype(jnp.float32), axis_name)


def refuse_weight(extra: Mapping[str, Any], name: str, reason: str) -> None:
    """Refuses a weight in a method that has none.

    Raises:
        ValueError: if there is one among the extra arguments.
    """
    if extra.get("weight") is not None:
        raise ValueError(
            f"{name} takes no weight=: {reason}; leave it out, or use gradcomp_jax.outer_average, which takes one"
        )


def _as_before(found: tuple[PyTree, Any], updates: PyTree, before: Any) -> tuple[PyTree, Any]:
    """Returns updates and state of a method that was given wider gradients, in the dtypes that they have without a weight."""
    moved, after = found
    moved = jax.tree.map(lambda m, g: kernels.narrowed(m, g.dtype), moved, updates)
    return moved, jax.tree.map(lambda a, b: a if a.dtype == b.dtype else kernels.narrowed(a, b.dtype), after, before)


def _is_exchange(node: object) -> bool:
    return isinstance(node, ExchangeState)


def _check(state: Any) -> None:
    if nodes_within(state, lambda node: hasattr(node, "staleness")):
        raise ValueError(
            "weighted goes around an exchange, and here it is around a method that decides when there is one: put it inside,"
            " such as gc.diloco(gc.weighted(gc.dense(axis_name=...), axis_name=...), axis_name=...)"
        )
    if nodes_within(state, lambda node: isinstance(node, ShardState)):
        raise ValueError(
            "a worker that is several devices is absent as a whole: put weighted inside, such as"
            " gc.hierarchical(gc.weighted(method, axis_name=...), axis_name=..., inner_axis_name=...)"
        )
    if not nodes_within(state, _is_exchange):
        raise ValueError("there is no exchange in this transformation: put a gradcomp_jax.exchange or a method inside")


def _emptied(node: Any, absent: Array) -> Any:
    """Returns an exchange's state with memories of zeros where a worker is absent, and the rest unchanged."""
    if not _is_exchange(node):
        return node
    return node._replace(memory=jax.tree.map(lambda x: kernels.chosen(absent, jnp.zeros_like(x), x), node.memory))


def _back(before: ExchangeState, after: ExchangeState, absent: Array, keys: StepKeys) -> tuple:
    """Returns the memories after an exchange. An absent worker's are those before it plus what the exchange gave back."""

    def is_kept(node: object) -> bool:
        return is_per_device(node) or narrow.is_narrow(node)

    kept, treedef = jax.tree.flatten(before.memory, is_leaf=is_kept)
    new = jax.tree.leaves(after.memory, is_leaf=is_kept)
    pairs = zip(kept, new, keys.of_leaves(keys.own, range(len(kept))), strict=True)
    return jax.tree.unflatten(treedef, [_joined(*pair, absent) for pair in pairs])


def _joined(before: Any, given: Any, key: Array, absent: Array) -> Any:
    """Returns an absent worker's memory as it is kept: the sum of two, or the first bit by bit where the other is zero."""
    old, new = (jax.tree.map(lambda p: p.value, node, is_leaf=is_per_device) for node in (before, given))
    values = narrow.values_of(old)
    if values.dtype == jnp.float32:
        both = jnp.where(new == 0, old, old + new)
    else:
        total, dtype = narrow.opened(old) + narrow.opened(new), str(values.dtype)
        rounded = narrow.closed(total, dtype, narrow.scales(total, dtype), key)
        nothing = ~jnp.any(narrow.opened(new) != 0)
        both = jax.tree.map(lambda a, b: kernels.chosen(nothing, a, b), old, rounded)
    result = jax.tree.map(lambda a, b: kernels.chosen(absent, a, b), both, new)
    return jax.tree.map(_marked, before, result, is_leaf=is_per_device)


def _marked(mark: PerDevice, value: Array) -> PerDevice:
    return dataclasses.replace(mark, value=value)
