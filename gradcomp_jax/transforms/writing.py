"""Writes the new state of a step, unless it was skipped: in the memory's dtype, and in place."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax import collectives as co
from gradcomp_jax import kernels
from gradcomp_jax._typing import Array
from gradcomp_jax.collectives import owners
from gradcomp_jax.memory import narrow
from gradcomp_jax.per_device import is_per_device
from gradcomp_jax.transforms import limits
from gradcomp_jax.transforms.outbound import OutboundMessage


def written(ok: Array, new: Any, old: Any, marks: Any) -> Any:
    """Returns new values where the exchange took place, old ones where it was skipped, with the ``PerDevice`` marks of a tree.

    The last array is written first, and on CPU each array waits for the one after it. An accumulator is made from the old
    velocity, so the velocity can be overwritten in place, without a copy, only once the accumulator is there. The other
    backends write all of them in one pass.
    """
    places, treedef = jax.tree.flatten(marks, is_leaf=is_per_device)
    triples = list(zip(places, jax.tree.leaves(new), jax.tree.leaves(old), strict=True))
    kept: list[Any] = []
    for mark, value, before in reversed(triples):
        after = kernels.chosen(ok, value, before)
        if after.size and len(places) > 1:
            ok = ok & lax.platform_dependent(after.reshape(-1)[0], cpu=_known, default=_always)
        kept.append(dataclasses.replace(mark, value=after) if is_per_device(mark) else after)
    return jax.tree.unflatten(treedef, kept[::-1])


def _known(first: Array) -> Array:
    """Returns true for every number: a dependence that the compiler cannot fold away, because a NaN differs from itself.

    Integers are symmetric here and never have their dtype's least value, which the compiler does not know.
    """
    if jnp.issubdtype(first.dtype, jnp.integer):
        return first != jnp.iinfo(first.dtype).min
    return first == first


def _always(first: Array) -> Array:
    """Returns true, with the same varying axes as :func:`_known`."""
    return (first == first) | True


def owners_written(
    out: OutboundMessage, residual: Array, received: Sequence[int], old: Any, ok: Array, workers: co.Workers
) -> Any:
    """Returns this owner's residual of the group, with new values for the message's rows."""
    group, dtype, runs = out.group, out.group.memory.dtype, owners.runs(out.starts, received)
    new: Any = residual
    if dtype != "float32":
        new = narrow.closed(residual, dtype, narrow.scales(residual, dtype), out.info.need("key"))
    values = jax.tree.map(lambda p: p.value, old, is_leaf=is_per_device)
    kept = limits.held(group, values, workers)

    def put(mark: Any, before: Array, rows: Array, held: Array) -> Any:
        after = owners.put(before, rows, runs, mark.rows, workers.index, workers.count)
        return dataclasses.replace(mark, value=kernels.chosen(ok, after, held))

    return jax.tree.map(put, old, values, new, kept, is_leaf=is_per_device)
