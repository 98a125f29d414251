"""Gradients that somebody has averaged already."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from gradcomp_jax import _compat
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.transforms.policies import path_name


def refuse_reduced(updates: PyTree, axis_name: AxisName | None, averaged: Iterable[int] = ()) -> None:
    """Refuses a gradient that does not vary over the axis: somebody summed it, and nothing is left to compress.

    Leaves whose numbers are in ``averaged`` are their mean on purpose.

    Raises:
        ValueError: naming the first such leaf.
    """
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
