"""Gives what Flax overwrites with its gradient its new values, equal on all workers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax import _compat, kernels
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.core.overwritten import COLLECTION, has_overwritten, is_overwritten, joined, trained
from gradcomp_jax.training import seen
from gradcomp_jax.training.state import with_parts


def heard(gradient: PyTree, params: PyTree, axis_name: AxisName | None, *, weight: Array | None = None) -> PyTree:
    """Returns a gradient whose collection :data:`COLLECTION` has its new values.

    They are the workers' maximum: a scale that fits all of them, and the largest entry that any has seen. A NaN counts as an
    infinity. A leaf keeps its old value if the new one is not finite, and so do integers, which have no gradient. Everything
    else is returned unchanged.

    Args:
        gradient: a gradient in the structure of the parameters.
        params: the old values.
        axis_name: the axis of the workers; ``None``, or an axis that is not mapped, for the values of one worker.
        weight: what this worker counts for; a worker of weight 0 is ignored.
    """
    named, treedef = jax.tree_util.tree_flatten_with_path(gradient)
    leaves, mine = [leaf for _, leaf in named], [i for i, (path, _) in enumerate(named) if is_overwritten(path)]
    if not mine:
        return gradient
    before = {i: jnp.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(params)) if i in mine}
    floats = [i for i in mine if jnp.issubdtype(before[i].dtype, jnp.floating)]
    values = [_counting(kernels.widened(jnp.asarray(leaves[i])), weight) for i in floats]
    if axis_name is not None and _compat.axis_size(axis_name) is not None:
        values = seen.over_workers(["max"] * len(values), values, axis_name)
    new = dict(before)
    for i, value in zip(floats, values, strict=True):
        value = value.astype(before[i].dtype)
        new[i] = jnp.where(jnp.isfinite(value).all(), value, before[i])
    return jax.tree.unflatten(treedef, [new.get(i, leaf) for i, leaf in enumerate(leaves)])


def kept_if_skipped(new: Any, old: Any, count: Callable[[PyTree], Array]) -> Any:
    """Returns a train state with the old collection if the step has raised ``count(opt_state)``."""
    if not has_overwritten(new.params):
        return new
    skipped = count(new.opt_state) != count(old.opt_state)
    collections = new.params[COLLECTION], old.params[COLLECTION]
    kept = {COLLECTION: jax.tree.map(lambda a, b: jnp.where(skipped, b, a), *collections)}
    return with_parts(new, params=joined(new.params, trained(new.params), kept))


def kinds_of(gradient: PyTree) -> list[str]:
    """Returns the kind of each leaf of a gradient over micro-batches, of those in :mod:`gradcomp_jax.training.seen`."""
    return ["max" if is_overwritten(path) else seen.STATE for path, _ in jax.tree_util.tree_leaves_with_path(gradient)]


def _counting(x: Array, weight: Array | None) -> Array:
    """Returns a value for a maximum, without NaNs, which each platform treats in its own way."""
    x = jnp.where(jnp.isnan(x), jnp.inf, x)
    return x if weight is None else jnp.where(weight == 0, -jnp.inf, x)
