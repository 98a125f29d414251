"""The exchange: per-device gradients in, the averaged update out, what was not sent in explicit state."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _checks, _compat
from gradcomp_jax import collectives as co
from gradcomp_jax import memory as mem
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.collectives import routes
from gradcomp_jax.compressors import Compressor, dense
from gradcomp_jax.per_device import PerDevice, Return, is_per_device
from gradcomp_jax.transforms.memory_ratio import memory_ratio
from gradcomp_jax.transforms.passes import Streams, absorb
from gradcomp_jax.transforms.plan import Part, Piece, Planner, View, path_name
from gradcomp_jax.transforms.policies import Policy, Select, Selected, gains
from gradcomp_jax.transforms.sending import Sent, at, send

INNER_AXIS = "inner_axis_name"
BUCKETS = "gradcomp_buckets"


class ExchangeState(NamedTuple):
    """State of :func:`exchange`.

    Attributes:
        step: int32 scalar, updates seen, skipped ones included.
        skipped: int32 scalar, exchanges skipped because some worker's gradient was not finite, or too large.
        memory: for each part and piece, the memory as :class:`~gradcomp_jax.per_device.PerDevice` float32 rows.
        compressor: for each part and piece, the compressor's own state.
        server: for each part, the owners' residual (``PerDevice`` of kind ``share``) or ``()``.
        memory_ratio: the norm of this worker's memories over that of its gradient, ``PerDevice`` float32 ``[1]``, estimated
            from some entries of each tensor; ``()`` without a memory. It settles near the number of steps that an entry
            waits for; if it keeps growing, something never goes out.
    """

    step: Array
    skipped: Array
    memory: tuple
    compressor: tuple
    server: tuple
    memory_ratio: Any


def exchange(
    compressor: Compressor | Policy,
    *,
    axis_name: AxisName | None,
    memory: mem.Memory | None = None,
    route: co.Route | str = "auto",
    select: Select | None = None,
    view: View | None = None,
    dense_compressor: Compressor | None = None,
    key: Any = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages compressed gradients over an axis and keeps what was not sent.

    On worker :math:`i`: the memory makes a target :math:`p^i` of the gradient, the worker sends :math:`C(p^i)`, and
    every worker's update is the mean of what arrived. Law: in every step, the mean over the workers of what the
    memories hold, plus the server residual, plus the sum of all updates, equals the sum of all mean gradients (of the
    unbiased codes without memory it holds in expectation).

    Takes per-device gradients (see :func:`gradcomp_jax.local_value_and_grad`), returns updates that are equal on every
    worker, in the gradients' dtype. Local clipping and weight decay go before it, optimizers after it. Works under
    ``shard_map`` (``check_vma`` on or off), ``pmap`` and ``vmap(axis_name=...)``.

    A gradient with a NaN or an infinity on any worker: all workers skip that exchange together. The update is zero, the
    memories stay as they were, ``skipped`` goes up. So it is where what a worker sends from, gradient and memory, has a
    magnitude above 1/(4N) of float32's largest number (2e37 for four workers), because sums could overflow; codes that add
    entries up before they send (signs, rotations, frequencies, low rank) may skip from that over their block's entries on.

    State: :class:`ExchangeState`; memories are float32 and per device. Initialise inside the axis
    (:func:`gradcomp_jax.init_state` does): the owners' shares, which selections in two phases have by default, depend on
    the number of workers.
    Wire: the payloads, one buffer, and one word for the common decision to skip.

    Args:
        compressor: encodes the selected leaves, each by itself; or a policy that says which compressor for which leaf
            (:func:`gradcomp_jax.by_size`, :func:`gradcomp_jax.by_path`).
        axis_name: the axis to average over, or ``None`` for the local round trip of one worker.
        memory: what stays behind; ``residual()`` by default.
        route: ``"auto"``, ``"gather"``, ``"two_phase"``, ``"sum"``, ``"doubling"``, or a
            :class:`~gradcomp_jax.collectives.Route`, such as :func:`~gradcomp_jax.collectives.reduce_scatter`, which returns
            each worker's shard of the update.
        select: ``select(path, leaf) -> bool``, which leaves to compress. By default those with two or more dimensions
            for which the payload is smaller than the dense leaf. A policy selects by itself.
        view: how leaves are cut into the compressor's blocks: ``rows``, stretches of a leaf; ``dealt``, a leaf's entries dealt
            out over the blocks in turn, so that each is a sample of all of it; ``columns``, a leaf's columns (its last
            dimension); ``tree``, all leaves together, dealt. By default ``dealt`` for
            :func:`~gradcomp_jax.compressors.topk` and ``rows`` for all others.
        dense_compressor: for the leaves left out, which cross joined together; float32 by default.
        key: seed (int) or typed JAX key of all randomness. The same key gives the same bits on every run.

    Raises:
        ValueError: at construction, if compressor, memory and route do not go together; when traced, if the gradients
            are already reduced over ``axis_name``.
        NameError: when traced outside the axis.
    """
    route = co.as_route(route)
    if axis_name is None:
        # One worker has no mean to encode once more, and needs no owner's residual.
        route = dataclasses.replace(route, second_encoding=False)
    planner = planner_of(
        compressor, memory=memory, route=route, select=select, view=view, dense_compressor=dense_compressor
    )

    def init(params: PyTree) -> ExchangeState:
        workers = _compat.axis_size(axis_name)
        if workers is None and planner.route.kind == "reduce_scatter":
            raise NameError(_unbound(axis_name))
        workers = workers or 1
        memories, states, servers = [], [], []
        for part, members in planner.plan(planner.whole(params, axis_name, workers), axis_name, workers).parts:
            memories.append(tuple(_init_memory(part, p, axis_name) for p in members))
            states.append(tuple(part.compressor.init((p.size,)) for p in members))
            servers.append(_init_server(part, members, workers, axis_name))
        zero = jnp.zeros((), jnp.int32)
        ratio: Any = ()
        if jax.tree.leaves((memories, servers)):
            # Where only owners have a residual, too: its shape alone would not tell a checkpoint how many workers there were.
            ratio = PerDevice(_compat.varying(jnp.zeros((1,), jnp.float32), axis_name), 1)
        return ExchangeState(zero, zero, tuple(memories), tuple(states), tuple(servers), ratio)

    def update(
        updates: PyTree, state: ExchangeState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, ExchangeState]:
        del params
        leaves, treedef = jax.tree.flatten(updates)
        workers = _bound_size(axis_name)
        plan = planner.plan(updates, axis_name, workers)
        inner = inner_axis(extra)
        if inner is not None and planner.route.kind == "reduce_scatter":
            raise ValueError(
                "a reduce-scatter is for parameters that lie along the exchange's own axis; for those along the inner one give"
                " gradcomp_jax.hierarchical their param_specs"
            )
        refuse_reduced(updates, axis_name, plan.averaged)
        if not leaves:
            return updates, state._replace(step=state.step + 1)
        streams = Streams.of(key, state.step, axis_name, inner)
        numbers = plan.buckets(buckets_of(extra))
        gradient, averaged = list(leaves), [leaves[i] for i in plan.averaged]
        sent: list[Sent] = []
        for chosen in numbers:
            also, before = ([], sent[-1]) if sent else (averaged, None)
            sent.append(
                send(plan, chosen, leaves, state, streams, axis_name, bucket=len(sent), also=also, before=before)
            )
        ok = jnp.stack([s.ok for s in sent]).all()
        if inner is not None:
            # Each device has seen its part of the tensors alone, and all of a worker must skip together.
            ok = _compat.invarying(jax.lax.pmin(ok.astype(jnp.int32), inner) > 0, inner)
        memory, compressor = [list(of) for of in state.memory], [list(of) for of in state.compressor]
        servers = list(state.server)
        for bucket in sent:
            for n, e, js, delivery in bucket.arrivals():
                done = absorb(e, delivery, leaves, at(memory[n], js), at(compressor[n], js), servers[n], ok, streams)
                for j, new_memory, new_state in zip(js, done.memory, done.compressor, strict=True):
                    memory[n][j], compressor[n][j] = new_memory, new_state
                servers[n] = done.server
                for i, value in done.updates.items():
                    leaves[i] = value
        for i, leaf in enumerate(leaves):
            if not leaf.size:
                # Nothing crossed, but it too must be known to be equal on all workers.
                leaves[i] = jnp.zeros(leaf.shape, leaf.dtype)
        for i in plan.averaged:
            leaves[i] = jnp.where(ok, _compat.invarying(leaves[i], axis_name), jnp.zeros((), leaves[i].dtype))
        skipped = state.skipped + jnp.where(ok, 0, 1).astype(jnp.int32)
        ratio = state.memory_ratio
        if is_per_device(ratio):
            held = (
                (part.memory, piece.leaves, kept)
                for (part, members), states in zip(plan.parts, memory, strict=True)
                for piece, kept in zip(members, states, strict=True)
                if part.memory.keeps
            )
            ratio = dataclasses.replace(ratio, value=memory_ratio(held, gradient, ratio.value, ok))
        result = ExchangeState(
            state.step + 1, skipped, tuple(map(tuple, memory)), tuple(map(tuple, compressor)), tuple(servers), ratio
        )
        return jax.tree.unflatten(treedef, leaves), result

    return optax.GradientTransformationExtraArgs(init, update)


def planner_of(
    compressor: Compressor | Policy,
    *,
    memory: mem.Memory | None = None,
    route: co.Route | str = "auto",
    select: Select | None = None,
    view: View | None = None,
    dense_compressor: Compressor | None = None,
) -> Planner:
    """What :func:`exchange` makes of the same arguments: which leaves go through what, for any tree."""
    memory = mem.residual() if memory is None else memory
    dense_compressor = dense() if dense_compressor is None else dense_compressor
    policy: Policy
    if isinstance(compressor, Policy):
        if select is not None:
            raise ValueError("a policy says which leaves are compressed; leave select= out, or give it one compressor")
        policy = compressor
    elif not isinstance(compressor, Compressor):
        raise TypeError(
            f"exchange takes a compressor or a policy, got {compressor!r}; build one with gradcomp_jax.compressors,"
            " gradcomp_jax.by_size or gradcomp_jax.by_path"
        )
    else:
        policy = Selected(compressor, gains(compressor, dense_compressor) if select is None else select)
    if view is not None:
        _checks.one_of("view", view, get_args(View))
    on_dense = memory.on_dense(lossless=dense_compressor.lossless)
    dense_part = Part(dense_compressor, on_dense, co.auto(second_encoding=True))
    return Planner(policy, memory, co.as_route(route), view, dense_part)


def inner_axis(extra: Mapping[str, Any]) -> AxisName | None:
    """The axis of the devices that are one worker, which a hierarchical exchange tells those within it."""
    return extra.get(INNER_AXIS)


def buckets_of(extra: Mapping[str, Any]) -> Sequence[Sequence[int]] | None:
    """The leaves' numbers, bucket after bucket, of :func:`gradcomp_jax.bucketed`; ``None`` for one of all."""
    return extra.get(BUCKETS)


def in_buckets(
    collective: Callable[[list[Array], Any], list[Array]],
    arrays: Sequence[Array],
    axis_name: AxisName,
    extra: Mapping[str, Any],
    where: Sequence[bool] | None = None,
) -> list[Any]:
    """One collective for each bucket of the arrays, of which each is a leaf's; ``None`` where an array is left out."""
    result: list[Any] = [None] * len(arrays)
    came: list[Array] = []
    for bucket in buckets_of(extra) or [range(len(arrays))]:
        chosen = [i for i in bucket if where is None or where[i]]
        # One after the other: a compiler that combines collectives would make one of all.
        came = collective(co.wait([arrays[i] for i in chosen], came), axis_name) or came
        for i, value in zip(chosen, came if chosen else [], strict=True):
            result[i] = value
    return result


def _bound_size(axis_name: AxisName | None) -> int:
    size = _compat.axis_size(axis_name)
    if size is None:
        raise NameError(_unbound(axis_name))
    return size


def _unbound(axis_name: AxisName | None) -> str:
    return (
        f"the axis {axis_name!r} is not bound here: call update (and init, where state depends on the number of workers)"
        f" inside jax.shard_map, jax.pmap or jax.vmap(axis_name={axis_name!r}), or build the transformation with"
        " axis_name=None for one worker"
    )


def refuse_reduced(updates: PyTree, axis_name: AxisName | None, averaged: Iterable[int] = ()) -> None:
    """A gradient that does not vary over the axis was summed by somebody: there is nothing left to compress."""
    if not _compat.tracks_varying(axis_name):
        return
    expected = set(averaged)
    for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(updates)):
        # Without entries there is nothing to reduce, and a choice among none is a constant.
        if i not in expected and jnp.size(leaf) and not _compat.is_varying(leaf, axis_name):
            raise ValueError(
                f"the gradient {path_name(path)!r} is already reduced over {axis_name!r}: inside jax.shard_map, "
                "jax.grad with respect to replicated parameters inserts a dense all-reduce of its own. Differentiate with"
                f" gradcomp_jax.local_value_and_grad(loss, axis_name={axis_name!r}), or cast the parameters first with"
                f" jax.lax.pcast(params, {axis_name!r}, to='varying')"
            )


def _init_memory(part: Part, piece: Piece, axis_name: AxisName | None) -> Any:
    rows = part.kept_rows(piece)
    zeros = _compat.varying(part.memory.init(jnp.zeros((rows, part.compressor.block), jnp.float32)), axis_name)
    return jax.tree.map(lambda a: PerDevice(a, rows, entries=piece.size if piece.cut else 0), zeros)


def _init_server(part: Part, members: list[Piece], workers: int, axis_name: AxisName | None) -> Any:
    least = routes.owners_from(part.route, part.compressor, part.memory)
    if not members or least is None:
        return ()
    rows = tuple(part.rows(p) for p in members)
    returns = Return(least, rows, part.dealt, -1 if part.memory.counts_sent else 1) if least > 1 else None
    mark = PerDevice(jnp.zeros(()), sum(rows), "share", returns=returns)
    zeros = jnp.zeros((mark.held(workers), part.compressor.block), jnp.float32)
    return dataclasses.replace(mark, value=_compat.varying(zeros, axis_name))
