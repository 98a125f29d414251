"""Arrays that several passes over a tensor read, held in memory in the layout that suits the passes."""

import math
from typing import Any

import jax
from jax import lax

from gradcomp_jax import kernels
from gradcomp_jax._typing import Array
from gradcomp_jax.core.layout import Group


def sources(group: Group, read: Any, after: Any) -> Any:
    """Returns what a target is made of, held for the pass that makes it, once ``after`` is there.

    Rows of one entry without a memory are read in one pass, over any shape that the compiler chooses.
    """
    if group.compressor.block == 1 and not group.memory.keeps:
        return kernels.held_on_cpu((read, after))[0]
    if group.compressor.row_shape is None:
        return lax.optimization_barrier((read, after))[0]

    def as_they_are(read: Any, after: Any) -> Any:
        return lax.optimization_barrier((read, after))[0]

    def as_matrices(read: Any, after: Any) -> Any:
        return _as_matrices(group, read, after)

    return lax.platform_dependent(read, after, tpu=as_matrices, default=as_they_are)


def memory(group: Group, new: Any) -> Any:
    """Returns a new memory; where rows are matrices, TPU computes it in their shape."""
    if group.compressor.row_shape is None:
        return new
    return lax.platform_dependent(new, tpu=lambda new: _as_matrices(group, new, ()), default=lambda new: new)


def _as_matrices(group: Group, tree: Any, after: Any) -> Any:
    """Returns arrays of rows, held as matrices: TPU copies between the two layouts, here once and not for each pass."""
    shape = group.compressor.row_shape or ()

    def laid(a: Array) -> Array:
        return a.reshape(-1, *shape) if a.ndim == 2 and a.shape[1] == math.prod(shape) else a

    held = lax.optimization_barrier((jax.tree.map(laid, tree), after))[0]
    return jax.tree.map(lambda a, b: a.reshape(b.shape), held, tree)
