"""What is not finite stays out: of a replica, and of what the others hear of it.

Where replicas differ, a bad gradient is the worker's own affair. In a synchronous exchange all workers skip together, because
all must stay equal.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax import _compat, kernels
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.compressors.base import LARGEST
from gradcomp_jax.per_device import PerDevice


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReplicaState:
    """What the state of a method begins with that goes after a replica's own optimizer.

    Attributes:
        step: int32 scalar, updates seen.
        dropped: ``PerDevice`` int32 ``[1]``, how many of this replica's updates were not finite and are left out.
        every: steps from one exchange to the next, as configured.
    """

    step: Array
    dropped: PerDevice
    every: int = dataclasses.field(metadata={"static": True})


def or_zeros(tree: PyTree, largest: float = LARGEST) -> tuple[PyTree, Array]:
    """Returns the tree in float32, all zeros if any entry is not finite or too large, and whether all are finite."""
    ok = all_finite(tree, largest)
    return jax.tree.map(lambda x: jnp.where(ok, x.astype(jnp.float32), 0.0), tree), ok


def all_finite(tree: PyTree, largest: float = LARGEST) -> Array:
    """Returns whether every entry of every leaf is, and none above a magnitude."""
    return jnp.stack([jnp.array(True), *(kernels.all_finite(x, largest) for x in jax.tree.leaves(tree))]).all()


def steady(updates: PyTree, params: PyTree) -> tuple[PyTree, Array]:
    """Updates in float32, zeros throughout if they or where they lead are not finite; and whether they are."""
    led = jax.tree.map(lambda p, u: jnp.asarray(p).astype(jnp.float32) + u.astype(jnp.float32), params, updates)
    ok = all_finite(led)
    return jax.tree.map(lambda u: jnp.where(ok, u.astype(jnp.float32), 0.0), updates), ok


def counter(axis_name: AxisName | None) -> PerDevice:
    """Returns a worker's own count, at zero."""
    return PerDevice(_compat.varying(jnp.zeros((1,), jnp.int32), axis_name), 1)


def count(before: PerDevice, ok: Array) -> PerDevice:
    """Adds one where not ok."""
    return PerDevice(before.value + jnp.where(ok, 0, 1).astype(jnp.int32), 1)


def like(tree: PyTree, example: PyTree) -> PyTree:
    """Casts a tree to the dtypes of another one."""
    return jax.tree.map(lambda x, e: x.astype(jnp.asarray(e).dtype), tree, example)


def need_replicas(params: Any, axis_name: AxisName | None, name: str) -> None:
    """Refuses an update without parameters, and, where it is tracked, with parameters that all workers share."""
    if params is None:
        raise ValueError(f"{name} compares parameters: call update(updates, state, params)")
    if not _compat.tracks_varying(axis_name):
        return
    if not all(_compat.is_varying(p, axis_name) for p in jax.tree.leaves(params)):
        raise ValueError(
            f"{name} gives every worker parameters of its own, and here all share one set: build the state with"
            " gradcomp_jax.init_state(..., replicas=True)"
        )
