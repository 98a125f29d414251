"""An all-gather and a reduce-scatter in forms that the compiler does not turn into an all-reduce.

XLA:TPU (libtpu 0.0.42) may carry out either as an all-reduce of the whole array, with zeros in place of the other devices'
parts, which sends twice the bytes. Compiled for v5e, v5p and v6e, an all-gather of any dtype became an all-reduce in two cases.
One is a shard whose entries are not a multiple of the 128 lanes, also between slices, over the data-centre network. The other
is a group of 64 devices or more within a slice, if the result is at most 16 MiB (on a three-dimensional torus, at any size).
Compiled for slices of v5e and v6e joined by a data-centre network, a reduce-scatter within a slice always became an all-reduce
unless each device's shard was of whole pairs of tiles (8 rows of 128 lanes, one for each direction of a ring); with them only
at a few sizes, on v5e. In a program of a single slice it becomes one in any form.
"""

import jax.numpy as jnp
from jax import lax

from gradcomp_jax import _compat
from gradcomp_jax._typing import Array, AxisName

LANES = 128
"""Entries of a row of a TPU's registers; the shard is filled up to a multiple of it."""

ROWS = 16
"""Rows of a pair of tiles of a TPU's memory."""

LARGEST_GROUP = 32
"""Most devices of an all-gather in one step; measured on powers of two."""

LARGEST_RESULT = 2**24
"""A large group's all-gather is one step if its result has more bytes: most tori then keep it an all-gather."""


def all_gather(x: Array, axis_name: AxisName) -> Array:
    """Stacks every worker's ``x``, ``[n]``, as ``[N, n]``, replicated.

    On TPU the shard is filled up to a multiple of :data:`LANES`. Over a single axis of more than :data:`LARGEST_GROUP` devices
    it is gathered in two steps, which together send as many bytes as one. Elsewhere, and where neither is needed, it is one
    plain all-gather.
    """
    first = _first_group(x, axis_name)
    if x.size % LANES == 0 and first is None:
        return _compat.all_gather(x, axis_name)

    def for_tpu(x: Array) -> Array:
        filled = jnp.pad(x, (0, -x.size % LANES))
        gathered = _compat.all_gather(filled, axis_name) if first is None else in_two_steps(filled, axis_name, first)
        return lax.slice_in_dim(gathered, 0, x.size, axis=1)

    # Only the branch of the target platform stays in the program.
    return lax.platform_dependent(x, tpu=for_tpu, default=lambda x: _compat.all_gather(x, axis_name))


def in_two_steps(x: Array, axis_name: AxisName, first: int) -> Array:
    """Stacks every worker's ``x``, ``[n]``, as ``[N, n]``: within runs of ``first`` neighbours, then between the runs.

    A worker sends ``first - 1`` shards and then ``N / first - 1`` runs of ``first``: N - 1 shards in all.

    Args:
        x: this worker's entries.
        axis_name: a mapped axis of ``shard_map``.
        first: devices of a run; divides N.
    """
    workers = _compat.axis_size(axis_name) or 1
    runs = [list(range(start, start + first)) for start in range(0, workers, first)]
    between = [list(range(offset, workers, first)) for offset in range(first)]
    x = _compat.varying(x, axis_name)
    run = lax.all_gather(x, axis_name, axis_index_groups=runs)
    every = lax.all_gather(run, axis_name, axis_index_groups=between)
    return _compat.invarying(every.reshape(workers, -1), axis_name)


def _first_group(x: Array, axis_name: AxisName) -> int | None:
    """Returns the number of devices in the first of two steps; ``None`` for one step."""
    workers = _compat.axis_size(axis_name) or 1
    too_large = workers * x.size * x.dtype.itemsize > LARGEST_RESULT
    # Over several axes the compiler makes its own steps, the slowest links first.
    if workers <= LARGEST_GROUP or too_large or not _compat.is_one_manual_axis(axis_name):
        return None
    sizes = [n for n in range(2, LARGEST_GROUP + 1) if workers % n == 0 and workers // n <= LARGEST_GROUP]
    return min(sizes, key=lambda n: n + workers // n, default=None)


def reduce_scatter(x: Array, axis_name: AxisName) -> Array:
    """Adds every worker's ``x``, ``[N, n]``, of which worker j gets row j of the sum: ``[n]``.

    On TPU the rows are filled up to whole pairs of tiles; elsewhere it is one plain reduce-scatter.
    """
    x = _compat.varying(x, axis_name)

    def for_tpu(x: Array) -> Array:
        size = x.shape[1]
        filled = jnp.pad(x, ((0, 0), (0, -size % (LANES * ROWS))))
        tiles = lax.psum_scatter(filled.reshape(-1, LANES), axis_name, scatter_dimension=0, tiled=True)
        return lax.slice_in_dim(tiles.reshape(-1), 0, size)

    def plain(x: Array) -> Array:
        return lax.psum_scatter(x, axis_name, scatter_dimension=0)

    # Only the branch of the target platform stays in the program.
    return lax.platform_dependent(x, tpu=for_tpu, default=plain)
