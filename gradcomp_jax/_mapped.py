"""Shapes inside a mapped function, where sizes of axes are known."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gradcomp_jax._typing import Array, PyTree


def local_shapes(start: Callable[..., PyTree], *args: PyTree, in_specs: Any, **mapping: Any) -> PyTree:
    """Returns shapes, dtypes and marks of what ``start`` returns on one device; they may depend on the size of an axis.

    Args:
        start: called inside ``jax.shard_map``.
        *args: arrays or shapes.
        in_specs: of ``args``.
        **mapping: mesh and axis names, as for ``jax.shard_map``.
    """
    found: list[PyTree] = []

    def probe(*args: PyTree) -> Array:
        found.append(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), start(*args)))
        return jnp.zeros(())

    jax.eval_shape(jax.shard_map(probe, in_specs=in_specs, out_specs=PartitionSpec(), **mapping), *args)
    return found[0]
