"""Replaces the method in the middle of a run: everything except the old method's own state continues."""

import difflib
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from gradcomp_jax import _arguments, _checks
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.core import ExchangeState
from gradcomp_jax.core.changed import said_of
from gradcomp_jax.core.overwritten import trained
from gradcomp_jax.memory import Momentum
from gradcomp_jax.memory.narrow import is_narrow
from gradcomp_jax.per_device import is_per_device, nodes_of, nodes_within
from gradcomp_jax.training.carried import carried, names_of, owners_of
from gradcomp_jax.training.initial import MappedInit, init_opt_state
from gradcomp_jax.training.refusals import refuse_donated
from gradcomp_jax.training.resize import wide
from gradcomp_jax.training.restored import placed
from gradcomp_jax.training.state import has_replicas, with_parts
from gradcomp_jax.transforms import LossScaleState, MasterWeightsState, RateWeightedState

_WRAPPERS = (LossScaleState, MasterWeightsState, RateWeightedState)
"""States of our wrappers around an exchange, whose numbers continue."""

_ALIKE = ("topk_sgd", "random_k", "fp8", "block_quantized", "ef_sign_sgd", "sparcml")
"""Methods whose residuals are of gradients, in the order of the leaves: what one has not sent another can send."""


@_arguments.checked
def replace_method(
    state: Any,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    params: PyTree | None = None,
    axis_name: AxisName = "data",
    param_specs: PyTree | None = None,
) -> Any:
    """Returns a state for a chain with another method, which continues where the old one was.

    It keeps the step, the parameters, the model's state, and the parts of the optimizer's state that are not the method's and
    are in the new chain too, in the same order: Adam's moments, momenta, counts of schedules, a loss scale, master weights. An
    exchange of the new chain continues with the numbers of steps and of skipped ones, so a warm-up by steps is over if it would
    be. Its memories start empty, except for what was not sent yet. That is kept if both methods have the same name, or both
    keep residuals of gradients in the same layout (``topk_sgd``, ``random_k``, ``sparcml``, ``fp8``, ``block_quantized``,
    ``ef_sign_sgd``), and if they have the same ``mask``; what owners hold returns to the memories. Otherwise it is dropped,
    and a warning says how much. A velocity inside a method and an optimizer's momentum after it are different things, and
    neither becomes the other.

    Example:
        >>> state = gc.init_state(params, optax.chain(gc.dense(axis_name="data"), optax.adam(1e-3)), mesh)
        >>> tx = optax.chain(gc.block_quantized(axis_name="data", bits=4), optax.adam(1e-3))
        >>> state = gc.replace_method(state, tx, mesh)  # Adam's moments and the step stay

    Args:
        state: a train state, a state with ``replace``, such as flax's, or an optimizer's state alone.
        tx: the new chain, or :func:`gradcomp_jax.unreduced` of it.
        mesh: as for :func:`init_state`.
        params: the parameters, for an optimizer's state alone.
        axis_name: as for :func:`init_state`.
        param_specs: as for :func:`init_state`.

    Returns:
        A state of the same type. It keeps arrays of the old state, so a step that donates it takes those too.

    Raises:
        ValueError: for a state whose replicas differ, or an optimizer's state without parameters.
    """
    refuse_donated(state)
    if hasattr(state, "params") and hasattr(state, "opt_state"):
        if has_replicas(state):
            raise ValueError(
                "replicas have parameters and moments of their own: make one set with gradcomp_jax.consolidate(state), and a"
                " state of the new chain with gradcomp_jax.init_state"
            )
        inner = {"params": state.params, "axis_name": axis_name, "param_specs": param_specs}
        changes = {"opt_state": replace_method(state.opt_state, tx, mesh, **inner)}
        if hasattr(state, "tx"):
            changes["tx"] = tx
        return with_parts(state, **changes)
    if params is None:
        raise ValueError("an optimizer's state alone does not say which parameters it is of: pass params=")
    if isinstance(tx.init, MappedInit):
        fresh = tx.init(trained(params))
    else:
        fresh, _ = init_opt_state(params, tx, mesh, axis_name=axis_name, param_specs=param_specs)
    return _counted(_with_wrappers(_with_units(_with_memories(fresh, state), state), state), state)


def _is_exchange(node: Any) -> bool:
    return isinstance(node, ExchangeState)


def _is_ours(node: Any) -> bool:
    return type(node).__module__.startswith("gradcomp_jax.")


def _is_unit(node: Any) -> bool:
    """Returns whether a node is wholly of another library, and not a chain of several parts."""
    if _is_ours(node) or type(node) in (tuple, list):
        return False
    return not nodes_within(node, _is_ours)


def _signature(unit: Any) -> Any:
    leaves, treedef = jax.tree.flatten(unit)
    return treedef, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)


def _units(state: Any) -> Iterator[Any]:
    """Yields the states with arrays that are not a method's, in the order of the chain."""
    if isinstance(state, ExchangeState) or is_per_device(state):
        return
    if _is_unit(state):
        if jax.tree.leaves(state):
            yield state
        return
    for child in jax.tree.leaves(state, is_leaf=lambda node: node is not state):
        # Arrays in our own states belong to a method, except those that _with_wrappers handles.
        if not _is_ours(state) or nodes_within(child, _is_theirs):
            yield from _units(child)


def _is_theirs(node: Any) -> bool:
    return hasattr(node, "_fields") and not _is_ours(node)


def _with_units(fresh: Any, old: Any) -> Any:
    """Returns the new state with the parts of the old one that have the same kind and order."""
    before, after = list(_units(old)), list(_units(fresh))
    match = difflib.SequenceMatcher(
        None, [_signature(u) for u in before], [_signature(u) for u in after], autojunk=False
    )
    kept = {id(after[j + k]): before[i + k] for i, j, size in match.get_matching_blocks() for k in range(size)}
    taken = {id(unit) for unit in kept.values()}
    dropped = dict.fromkeys(type(unit).__name__ for unit in before if id(unit) not in taken)
    if dropped:
        _checks.warn(f"nothing of the new chain takes {', '.join(dropped)} of the old one: it is dropped")
    return jax.tree.map(lambda node: kept.get(id(node), node), fresh, is_leaf=lambda node: id(node) in kept)


def _with_wrappers(fresh: Any, old: Any) -> Any:
    """Returns the new state with the old numbers of our wrappers around an exchange."""
    for kind in _WRAPPERS:
        is_kind = functools.partial(lambda kind, node: isinstance(node, kind), kind)
        pairs = dict(zip(map(id, nodes_within(fresh, is_kind)), nodes_within(old, is_kind), strict=False))

        def own(node: Any, pairs: dict[int, Any] = pairs) -> Any:
            before = pairs.get(id(node))
            if before is None:
                return node
            same = {
                name: getattr(before, name)
                for name in node._fields
                if name != "inner" and _signature(getattr(before, name)) == _signature(getattr(node, name))
            }
            return node._replace(**same)

        fresh = jax.tree.map(own, fresh, is_leaf=is_kind)
    return fresh


def _counted(fresh: Any, old: Any) -> Any:
    """Returns the new state, in which exchanges continue to count."""
    before = nodes_within(old, _is_exchange)
    if not before:
        return fresh

    def on(node: Any) -> Any:
        if not _is_exchange(node):
            return node
        # Separate buffers, because a state may be donated.
        counts = {
            field: placed(np.asarray(getattr(before[0], field)), getattr(node, field)) for field in ("step", "skipped")
        }
        return node._replace(**counts)

    return jax.tree.map(on, fresh, is_leaf=_is_exchange)


def _with_memories(fresh: Any, old: Any) -> Any:
    """Returns the new state with what was not sent yet if a memory takes it; warns if none does."""
    before, after = nodes_within(old, _is_exchange), nodes_within(fresh, _is_exchange)
    lost = 0.0
    new: dict[int, Any] = {}
    around = [[type(n) for n in nodes_within(s, _is_ours) if isinstance(n, RateWeightedState)] for s in (old, fresh)]
    for number, exchange in enumerate(before):
        other = after[number] if len(before) == len(after) and around[0] == around[1] else None
        try:
            if other is None or not _are_alike(exchange, other):
                raise ValueError
            saved = {name: np.asarray(leaf) for name, leaf in names_of(exchange).items()}
            moved = carried(saved, owners_of(exchange), other)
            new[id(other)] = jax.tree.map(placed, moved, other)
        except ValueError:
            lost = math.hypot(lost, _owed(exchange))
    if lost:
        _checks.warn(
            f"the memories of {said_of(old)} do not fit {said_of(fresh)}: what they had not sent is dropped, a mean of norm"
            f" {lost:.3g}"
        )
    return jax.tree.map(lambda node: new.get(id(node), node), fresh, is_leaf=_is_exchange)


def _are_alike(before: ExchangeState, after: ExchangeState) -> bool:
    """Returns whether the memories of both exchanges mean the same, for the same entries."""
    old, new = before.made_by, after.made_by
    momenta = [bool(nodes_within(e.memory, lambda node: isinstance(node, Momentum))) for e in (before, after)]
    masks = [dict(maker.options).get("mask") for maker in (old, new)]
    if momenta[0] != momenta[1] or masks[0] != masks[1]:
        return False
    if old.name == new.name:
        kinds = ("compressor", "memory", "view", "matrix")
        return all(dict(old.options).get(kind) == dict(new.options).get(kind) for kind in kinds)
    return not momenta[0] and old.name in _ALIKE and new.name in _ALIKE


def _owed(exchange: ExchangeState) -> float:
    """Returns the norm of what the workers, on average, and the owners have not sent."""
    if any(mark.returns and mark.returns.sign < 0 for mark in nodes_of(exchange.server, is_per_device)):
        return 0.0
    if exchange.made_by.name == "ef21" or dict(exchange.made_by.options).get("memory") == "Estimate":
        # An estimate is of what has arrived, so nothing waits in it.
        return 0.0
    held = jax.tree.map(
        lambda node: node.accumulated if isinstance(node, Momentum) else node,
        exchange.memory,
        is_leaf=lambda node: isinstance(node, Momentum),
    )
    total = 0.0
    ratio = exchange.memory_ratio
    workers = len(jax.tree.leaves(ratio)[0]) // ratio.shards if is_per_device(ratio) else 1
    for tree, count in ((held, workers), (exchange.server, 1)):
        for node in jax.tree.leaves(tree, is_leaf=lambda node: is_narrow(node) or is_per_device(node)):
            value = np.asarray(wide(node).value, np.float64)
            total = math.hypot(total, float(np.linalg.norm(value.reshape(count, -1).mean(axis=0))))
    return total
