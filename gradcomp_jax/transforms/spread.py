"""Entries that are spread over an array, read without a pass over it."""

import math
from collections.abc import Sequence

import jax.numpy as jnp

from gradcomp_jax._typing import Array

WINDOW = 3 * 2**22
"""Bytes of a stride up to which lines are taken by one. XLA:TPU (libtpu 0.0.42) holds all that a stride spans in vector memory,
and what does not fit there, 16 MiB on v5e and v5p, does not compile."""
RUNS = 8
"""Stretches that lines are taken in where a stride would be longer."""
NARROW = 1024
"""Entries that a shorter line counts as, and one entry of a vector: they lie across on TPU, and fail at shorter strides."""
SIDE_BY_SIDE = 8
"""Lines of the axes before, at most, that lie in one tile with a line, and are spanned with it."""


def places(shape: Sequence[int], stride: int, axis: int = 0) -> list[slice]:
    """Returns which lines of a float32 array to take along an axis: every ``stride``-th, or about as many in some runs."""
    n = shape[axis]
    line = 4 * max(math.prod(shape[axis + 1 :]), NARROW) * min(math.prod(shape[:axis]), SIDE_BY_SIDE)
    if stride == 1 or stride * line <= WINDOW:
        return [slice(None, None, stride)]
    lines = -(-n // stride)
    runs = min(RUNS, lines)
    return [slice(start, start + lines // runs) for start in (i * n // runs for i in range(runs))]


def taken(x: Array, where: Sequence[Sequence[slice]]) -> Array:
    """Returns the lines at the :func:`places` of each of the leading axes."""
    for axis, runs in enumerate(where):
        if len(runs) > 1:
            before = (slice(None),) * axis
            x = jnp.concatenate([x[(*before, run)] for run in runs], axis)
    return x[tuple(runs[0] if len(runs) == 1 else slice(None) for runs in where)]
