"""The exchange: per-device gradients in, the averaged update out, what was not sent in explicit state."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _arguments, _compat, _registered
from gradcomp_jax import collectives as co
from gradcomp_jax import memory as mem
from gradcomp_jax._counters import count_on
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.core.beside import Exchanged
from gradcomp_jax.core.beside import exchanged as exchanged_beside
from gradcomp_jax.core.changed import NoWrapper, of_state
from gradcomp_jax.core.context import Context, context_of
from gradcomp_jax.core.description import describe
from gradcomp_jax.core.inbound import ratio_of, take_in
from gradcomp_jax.core.layout import Layout, View
from gradcomp_jax.core.layout_rules import layout_rules
from gradcomp_jax.core.made_by import MadeBy, made_by
from gradcomp_jax.core.masks import Mask
from gradcomp_jax.core.mean import MeanMessage
from gradcomp_jax.core.outbound import Step, all_finite, outbound
from gradcomp_jax.core.policies import Policy
from gradcomp_jax.core.refusals import (
    refuse_around,
    refuse_beyond_float32,
    refuse_other_layout,
    refuse_reduced,
    refuse_shared,
    refuse_unbound,
)
from gradcomp_jax.core.state import init_memory, init_server
from gradcomp_jax.core.step_keys import StepKeys
from gradcomp_jax.core.transport import Transported, transport
from gradcomp_jax.per_device import PerDevice, is_per_device


@_registered.node
@dataclasses.dataclass(frozen=True)
class ExchangeState(NoWrapper):
    """Holds the state of :func:`exchange`.

    Attributes:
        step: int32 scalar, updates seen, skipped ones included; near 2**31 it continues from about 2**30, as all counters here.
        skipped: int32 scalar, exchanges skipped because a gradient was not finite, or too large.
        memory: for each group and segment, the memory as :class:`~gradcomp_jax.per_device.PerDevice` rows in the memory's
            dtype, float32 by default; :class:`~gradcomp_jax.memory.Narrow` where that dtype has scales.
        compressor: for each group and segment, the compressor's own state.
        server: for each group, the owners' residual (``PerDevice`` of kind ``shard``, kept as the memory is) or ``()``.
        memory_ratio: the norm of this worker's memories over its gradient's, ``PerDevice`` float32 ``[1]``, estimated; ``()``
            without a memory. It settles near the number of steps that an entry waits; if it keeps growing, some are never sent.
        made_by: the method and its options, as ``init`` was given them; static, for checkpoints to compare.
    """

    step: Array
    skipped: Array
    memory: tuple
    compressor: tuple
    server: tuple
    memory_ratio: Any
    made_by: MadeBy = dataclasses.field(default=MadeBy(), metadata={"static": True})

    _replace = dataclasses.replace  # as the states of optax have it


@_arguments.checked
def exchange(
    compressor: Compressor | Policy,
    *,
    axis_name: AxisName | None,
    memory: mem.Memory | None = None,
    collective: co.Collective | str = "auto",
    mask: Mask | None = None,
    view: View | None = None,
    dense_compressor: Compressor | None = None,
    key: Any = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages compressed gradients over an axis and keeps what was not sent.

    On worker :math:`i`: the memory makes a target :math:`p^i` of the gradient, the worker sends :math:`C(p^i)`, and
    every worker's update is the mean of what arrived. Law: in every step, the mean over the workers of what the
    memories and owners hold, plus all updates, equals the sum of all mean gradients (of unbiased codes, in expectation).

    Takes per-device gradients (see :func:`gradcomp_jax.local_value_and_grad`), returns updates that are equal on every
    worker, in the gradients' dtype, of at most 32 bits. Local clipping and weight decay go before it, optimizers after it:
    ``optax.clip_by_global_norm`` before it clips each worker's gradient by that worker's norm, after it the update. Works under
    ``shard_map`` (``check_vma`` on or off), ``pmap`` and ``vmap(axis_name=...)``.

    If a gradient has a NaN or an infinity on any worker, all workers skip the exchange. The update is zero, ``skipped`` goes
    up, and memories stay, except entries so large that every later step would be skipped. The same happens where a target
    is above 1/(4N) of float32's largest number (2e37 for four workers); codes that add entries up (signs, rotations, low rank)
    may skip from that number divided by their block. An update beyond its leaf's range (float16) becomes the largest number of
    that range: memories keep the rest, but not what a cast rounds.

    State: :class:`ExchangeState`; memories are per device, and float32 unless they are made with another dtype. Initialise it
    inside the axis, as :func:`gradcomp_jax.init_state` does: owners' shards, which selections in two phases have by default,
    depend on the number of workers. Wire: the payloads, one buffer, and one word for the common decision to skip.

    Example:
        >>> codes = gc.compressors.block_quantized(bits=8)
        >>> quantized = functools.partial(gc.exchange, codes, memory=gc.memory.residual(), collective="two_phase")
        >>> tx = optax.chain(quantized(axis_name="data"), optax.sgd(0.1))
        >>> gc.planning.traffic.read(quantized, params, workers=8).sent  # bytes a worker sends in a step
        118279

    Args:
        compressor: encodes the leaves of the mask, each by itself; or a policy that says which compressor for which leaf
            (:func:`gradcomp_jax.by_size`, :func:`gradcomp_jax.by_path`).
        axis_name: the axis to average over, or ``None`` for the local round trip of one worker.
        memory: what stays behind; ``residual()`` by default.
        collective: ``"auto"``, ``"all_gather"``, ``"two_phase"``, ``"all_reduce"``, ``"recursive_doubling"``, or a
            :class:`~gradcomp_jax.collectives.Collective`, such as :class:`~gradcomp_jax.collectives.ReduceScatter`, which
            returns each worker's shard of the update.
        mask: which leaves to compress, as for ``optax.masked``: a tree of booleans, the parameters' or a prefix of it, or a
            function of the parameters' shapes that returns one; :mod:`gradcomp_jax.masks` makes some. The others go dense. By
            default leaves with two or more dimensions whose payload is smaller than the dense leaf, except stacked vectors,
            known by their names (``layers/norm/scale``). A policy decides alone.
        view: how leaves are divided into the compressor's blocks: ``rows``, stretches of a leaf; ``dealt``, a leaf's entries
            dealt out in turn, so that block j of R has the entries j, j + R, ..., a sample of the leaf; ``columns``, each of
            a leaf's columns (its last dimension) by itself; ``tree``, all leaves together, dealt. By default ``dealt`` for
            :func:`~gradcomp_jax.compressors.topk` and ``rows`` for all others.
        dense_compressor: for the leaves left out, which cross joined together; float32 by default.
        key: seed (int) or typed JAX key of all randomness, for codes that draw; others do not read it. The same key
            gives the same bits on every run.

    Returns:
        A transformation of per-device gradients. Its update is the mean of what arrived, in their shapes and dtypes, equal
        on every worker.

    Raises:
        ValueError: at construction, if compressor, memory and collective do not go together; when traced, if the gradients
            are already reduced over ``axis_name``, or the state is of other tensors or declared replicated.
        TypeError: when traced, for a leaf that is not a real floating-point array, or is wider than float32.
        NameError: when traced outside the axis.
    """
    maker = made_by("exchange", locals())
    collective = co.as_collective(collective)
    if axis_name is None and isinstance(collective, co.Auto):
        # One worker has no mean to encode again, and needs no owner's residual.
        collective = co.Auto()
    rules = layout_rules(
        compressor, memory=memory, collective=collective, mask=mask, view=view, dense_compressor=dense_compressor
    )

    # A layout is made once for a tree's shapes, as a rule by init: an update looks it up.
    @functools.lru_cache(maxsize=64)
    def layout_of(treedef: Any, shapes: tuple[jax.ShapeDtypeStruct, ...], workers: int) -> Layout:
        return rules.layout(jax.tree.unflatten(treedef, shapes), axis_name, workers)

    def init(params: PyTree) -> ExchangeState:
        if isinstance(rules.collective, co.ReduceScatter):
            refuse_unbound(axis_name)
        workers = _compat.axis_size(axis_name) or 1
        memories, states, servers = [], [], []
        leaves, treedef = jax.tree.flatten(rules.whole(params, axis_name, workers))
        for group, segments in layout_of(treedef, _shapes(leaves), workers).groups:
            memories.append(tuple(init_memory(group, s, axis_name) for s in segments))
            states.append(tuple(group.compressor.init((s.size,)) for s in segments))
            servers.append(init_server(group, segments, workers, axis_name))
        # Each array has its own buffer: a state may be donated.
        step, skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        ratio: Any = ()
        if jax.tree.leaves((memories, servers)):
            # Also where only owners have a residual: its shape alone does not tell a checkpoint how many workers there were.
            ratio = PerDevice(_compat.varying(jnp.zeros((1,), jnp.float32), axis_name), 1)
        return ExchangeState(step, skipped, tuple(memories), tuple(states), tuple(servers), ratio, maker)

    def update(updates: PyTree, state: ExchangeState, params: PyTree | None = None, **extra: Any) -> Any:
        refuse_unbound(axis_name)
        context, workers = context_of(extra), co.Workers.along(axis_name)
        leaves, treedef = jax.tree.flatten(updates)
        shapes = _shapes(leaves)
        layout = layout_of(treedef, shapes, workers.count)
        if extra:
            refuse_around(rules.collective, layout, extra, axis_name)
        refuse_beyond_float32(updates, layout.averaged)
        refuse_reduced(updates, axis_name, layout.averaged)
        if not leaves:
            return updates, state._replace(step=count_on(state.step))
        if context.describes:
            _together(describe(layout, context.buckets, workers), context)
            return updates, state
        refuse_other_layout(layout, state, workers.count)
        refuse_shared(state, axis_name, workers.count)
        keys = functools.partial(StepKeys.of, key, state.step, workers.index, context.inner_axis_name)
        wanted = context.wanted(updates) if context.dtypes else shapes
        step = Step(layout, leaves, wanted, state, keys, workers)
        run, beside = functools.partial(_exchanged, context=context), layout.beside if context.buckets is None else None
        sent, memory, code, server, ok = run(step) if beside is None else exchanged_beside(run, step, beside)
        for i in layout.averaged:
            mean = _compat.invarying(leaves[i], axis_name)
            sent[i] = jnp.where(ok, mean, jnp.zeros((), mean.dtype)).astype(wanted[i].dtype)
        # Nothing crossed of an empty leaf, but its update too must be known to be equal on all workers.
        result = [sent[i] if leaf.size else jnp.zeros(leaf.shape, wanted[i].dtype) for i, leaf in enumerate(leaves)]
        ratio = state.memory_ratio
        return jax.tree.unflatten(treedef, result), state._replace(
            step=count_on(state.step),
            skipped=jnp.where(ok, state.skipped, count_on(state.skipped)),
            memory=tuple(map(tuple, memory)),
            compressor=tuple(map(tuple, code)),
            server=tuple(server),
            memory_ratio=ratio_of(layout, memory, leaves, ratio, ok) if is_per_device(ratio) else ratio,
        )

    return of_state(ExchangeState, init, update, maker)


def _exchanged(step: Step, context: Context) -> Exchanged:
    layout, workers, state = step.layout, step.workers, step.state
    step = dataclasses.replace(step, keys=functools.cache(step.keys))
    crossed, sent = list[Transported](), dict[int, Array]()
    for number, bucket in enumerate(layout.buckets(context.buckets)):
        before = crossed[-1] if crossed else None
        messages = outbound(step, bucket, number, before.messages if before else ())
        also = [] if before else [step.leaves[i] for i in layout.averaged]
        bad = ~all_finite(messages, also, workers)
        crossed.append(transport(messages, bad, workers, before.received if before else None))
    ok = _together(jnp.stack([t.ok for t in crossed]).all(), context)
    memory, code = ([list(of) for of in kept] for kept in (state.memory, state.compressor))
    server = list(state.server)
    for message, came in [pair for done in crossed for pair in zip(done.messages, done.inbound, strict=True)]:
        if isinstance(message, MeanMessage):
            sent |= message.updates(came.payload, step.wanted, ok, workers.count)
            continue
        n = message.number
        updated, pieces, server[n] = take_in(step, message, came, server[n], ok)
        sent |= updated
        for piece in pieces:
            memory[n][piece.number], code[n][piece.number] = piece.memory, piece.code
    return Exchanged(sent, memory, code, server, ok)


def _shapes(leaves: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def _together(ok: Array, context: Context) -> Array:
    """Returns whether all devices of a worker accept the step; each has seen only its part of the tensors."""
    inner = context.inner_axis_name
    return ok if inner is None else _compat.invarying(jax.lax.pmin(ok.astype(jnp.int32), inner) > 0, inner)
