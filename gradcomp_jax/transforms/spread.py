"""Reads entries that are spread over an array, without a pass over it."""

import math
from collections.abc import Sequence

import jax.numpy as jnp

from gradcomp_jax._typing import Array

WINDOW = 3 * 2**22
"""Largest stride, in bytes, for which lines are taken by one slice. XLA:TPU (libtpu 0.0.42) holds all that a stride spans in
vector memory, and a stride that does not fit there, 16 MiB on v5e and v5p, does not compile."""
RUNS = 8
"""Number of runs in which lines are taken where a stride would be longer."""
NARROW = 1024
"""Entries that a shorter line, or an entry of a vector, counts as: on TPU they lie across, and fail at shorter strides."""
SIDE_BY_SIDE = 8
"""Most lines of the earlier axes that lie in one tile with a line; a stride spans them too."""


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
