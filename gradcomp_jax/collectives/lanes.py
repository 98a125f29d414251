"""An all-to-all of long rows, in the layout that TPU uses for computation.

XLA:TPU (libtpu 0.0.42) takes a minute and more to compile an all-to-all of narrow words in long rows; the longer the rows, the
longer it takes. In rows of 128 lanes it takes seconds, and the program copies less. ``benchmarks/tpu.py --table passes --method
block_quantized`` prints the effect on a whole update.
"""

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from gradcomp_jax import _compat
from gradcomp_jax._typing import Array, AxisName
from gradcomp_jax.collectives.gathering import LANES

LONG = 2**19
"""An array of at least so many words for one device has its own rows of lanes. For shorter arrays that is too many kernels."""

LONG_ALONE = 2**22
"""The same for a single array of wider words: in lanes it is copied once more, which does not pay for a shorter one."""

MOST_BYTES = 2**30
"""Most bytes of one all-to-all on TPU. At 2^31 libtpu 0.0.42 ends the process, in any layout (seen for 256 chips of v5e)."""


def all_to_all(buffer: Array, axis_name: AxisName) -> Array:
    """Sends slice j of ``[N, ...]`` to worker j; slice i of the result came from worker i."""
    each = _compat.mapped(_compat.varying(buffer, axis_name), axis_name)
    return lax.all_to_all(each, axis_name, 0, 0, tiled=True)


def pay(arrays: Sequence[Array]) -> bool:
    """Returns whether arrays should cross in lanes on TPU."""
    alone = len(arrays) == 1 and arrays[0].dtype.itemsize > 1
    long = any(a.shape[1] >= (LONG_ALONE if alone else LONG) for a in arrays)
    return long or sum(a.size * a.dtype.itemsize for a in arrays) > MOST_BYTES


def all_to_all_in_lanes(arrays: Sequence[Array], axis_name: AxisName) -> list[Array]:
    """Sends row j of every array ``[N, n]`` of one dtype to worker j, in one buffer ``[N, rows, 128]``.

    Each long array is filled up to whole rows; the others are filled up together. A buffer of more than ``MOST_BYTES`` crosses
    in parts.
    """
    workers = arrays[0].shape[0]
    long = [i for i, a in enumerate(arrays) if a.shape[1] >= LONG]
    short = [i for i in range(len(arrays)) if i not in long]
    together = [jnp.concatenate([arrays[i] for i in short], axis=1)] if short else []
    each = [_in_lanes(a) for a in [*(arrays[i] for i in long), *together]]
    buffer = jnp.concatenate(each, axis=1)
    parts = jnp.array_split(buffer, max(1, -(-buffer.nbytes // MOST_BYTES)), axis=1)
    crossed = jnp.concatenate([all_to_all(part, axis_name) for part in parts], axis=1)
    ends = list(itertools.accumulate((a.shape[1] for a in each), initial=0))
    rows = [crossed[:, start:end].reshape(workers, -1) for start, end in itertools.pairwise(ends)]
    result = {i: row[:, : arrays[i].shape[1]] for i, row in zip(long, rows, strict=False)}
    at = 0
    for i in short:
        result[i] = rows[-1][:, at : at + arrays[i].shape[1]]
        at += arrays[i].shape[1]
    return [result[i] for i in range(len(arrays))]


def _in_lanes(array: Array) -> Array:
    filled = jnp.pad(array, ((0, 0), (0, -array.shape[1] % LANES)))
    return filled.reshape(array.shape[0], -1, LANES)
