"""A reduce-scatter in a form that the compiler leaves a reduce-scatter.

XLA:TPU may carry out a reduce-scatter as an all-reduce of everything, which sends twice the bytes. Compiled for slices of v5e
and v6e joined by a data-centre network, libtpu 0.0.42, it always did so within a slice unless each device's shard was of whole
pairs of tiles (8 rows of 128 lanes, one for each direction of a ring); with them only at a few sizes, on v5e. In a program
of a single slice it does so in any form.
"""

import jax.numpy as jnp
from jax import lax

from gradcomp_jax import _compat
from gradcomp_jax._typing import Array, AxisName

LANES, ROWS = 128, 16
"""Entries of a row, and rows of a pair of tiles, of a TPU's memory."""


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

    # Only the branch of the platform that is lowered for stays in the program.
    return lax.platform_dependent(x, tpu=for_tpu, default=plain)
