"""Keeps what is not finite out of a replica, and out of what it sends to the others.

Where replicas differ, a bad gradient concerns only its own worker. In a synchronous exchange all workers skip together, because
all must stay equal.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax import _compat, _registered, kernels
from gradcomp_jax._counters import count_on
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.compressors.base import LARGEST
from gradcomp_jax.core.refusals import refuse_beyond_float32
from gradcomp_jax.per_device import PerDevice, nodes_within

FARTHEST = 2.0**64
"""The largest magnitude of a replica's parameter: differences of such numbers, their sums and squares can be exchanged."""


@_registered.node
@dataclasses.dataclass(frozen=True)
class ReplicaState:
    """Holds the common fields of the states of methods that go after a replica's own optimizer.

    Attributes:
        step: int32 scalar, updates seen.
        dropped: ``PerDevice`` int32 ``[1]``, how many of this replica's updates were left out because they were not finite, or
            led beyond :data:`FARTHEST`.
        every: steps from one exchange to the next, as configured.
    """

    step: Array
    dropped: PerDevice
    every: int = dataclasses.field(metadata={"static": True})


def or_zeros(tree: PyTree, largest: float = LARGEST) -> tuple[PyTree, Array]:
    """Returns the tree in float32, all zeros if any entry is not finite or too large, and whether all are finite."""
    refuse_beyond_float32(tree)
    ok = all_finite(tree, largest)
    return jax.tree.map(lambda x: jnp.where(ok, x.astype(jnp.float32), 0.0), tree), ok


def all_finite(tree: PyTree, largest: float = LARGEST) -> Array:
    """Returns whether every entry of every leaf is finite, and none is above ``largest``."""
    return jnp.stack([jnp.array(True), *(kernels.all_finite(x, largest) for x in jax.tree.leaves(tree))]).all()


def steady(updates: PyTree, params: PyTree) -> tuple[PyTree, Array]:
    """Returns the updates in float32, and whether they are taken.

    They are all zeros if an update, or a parameter after it, is not finite or too large. An exchange skips what is too large
    for its sums, so a replica that far away would never be brought back.
    """
    refuse_beyond_float32(updates)
    refuse_beyond_float32(params)
    led = jax.tree.map(lambda p, u: jnp.asarray(p).astype(jnp.float32) + u.astype(jnp.float32), params, updates)
    ok = all_finite(led, FARTHEST)
    return jax.tree.map(lambda u: jnp.where(ok, u.astype(jnp.float32), 0.0), updates), ok


def restored(new: PyTree, old: PyTree, marked: tuple[type, ...]) -> PyTree:
    """Returns a replica's optimizer state; the one before if its update was left out or the state is not finite.

    A NaN in a momentum or a second moment would stay there, and every later update of that replica would be left out. The same
    holds for a momentum that leads too far.

    Args:
        new: the state after an update.
        old: the state before it.
        marked: types of nodes that handle this themselves; they are passed through.
    """

    def is_marked(node: object) -> bool:
        return isinstance(node, marked)

    after, treedef = jax.tree.flatten(new, is_leaf=is_marked)
    pairs = list(zip(after, jax.tree.leaves(old, is_leaf=is_marked), strict=True))
    spoilt = [jnp.any(~jnp.isfinite(a) & jnp.isfinite(b)) for a, b in pairs if not is_marked(a) and a.size]
    counts = [[n.dropped.value[0] for n in nodes_within(s, lambda n: isinstance(n, ReplicaState))] for s in (new, old)]
    left_out = [a != b for a, b in zip(*counts, strict=True)]
    bad = jnp.stack([jnp.array(False), *left_out, *spoilt]).any()
    return jax.tree.unflatten(treedef, [a if is_marked(a) else jnp.where(bad, b, a) for a, b in pairs])


def counter(axis_name: AxisName | None) -> PerDevice:
    """Returns a worker's own count, at zero."""
    return PerDevice(_compat.varying(jnp.zeros((1,), jnp.int32), axis_name), 1)


def count(before: PerDevice, ok: Array) -> PerDevice:
    """Adds one where ``ok`` is false."""
    return PerDevice(jnp.where(ok, before.value, count_on(before.value)), 1)


def dropped(state: PyTree) -> Array:
    """Returns how many of one replica's updates were left out, by all methods in its state: int32 scalar."""
    counts = [node.dropped.value[0] for node in nodes_within(state, lambda node: hasattr(node, "dropped"))]
    return sum(counts, jnp.zeros((), jnp.int32))


def like(tree: PyTree, example: PyTree) -> PyTree:
    """Casts a tree to the dtypes of another one, and clips numbers to their range."""
    return jax.tree.map(lambda x, e: kernels.narrowed(x, jnp.asarray(e).dtype), tree, example)


def need_replicas(params: Any, axis_name: AxisName | None, name: str) -> None:
    """Refuses an update without parameters, and, where JAX tracks that, with parameters that all workers share."""
    if params is None:
        raise ValueError(f"{name} compares parameters: call update(updates, state, params)")
    if not _compat.tracks_varying(axis_name):
        return
    if not all(_compat.is_varying(p, axis_name) for p in jax.tree.leaves(params)):
        raise ValueError(
            f"{name} gives every worker parameters of its own, and here all share one set: build the state with"
            " gradcomp_jax.init_state(..., replicas=True)"
        )
