"""Pallas kernels for dealt blocks on TPU: they find the largest entry of each block, and place it, in the tiles of a matrix.

Neighbours in a row of the matrix are in neighbouring blocks, so a row is a stretch of a table along the blocks. A tile of
8 x 128 entries is 8 stretches, one for each row of the matrix: a load with a stride, and a rotation, because a stretch may
begin at any of 128 lanes. XLA:TPU copies the matrix to the layout of dealt lines instead, and back.
"""

import os
from typing import Any

import jax.numpy as jnp
from jax import lax

from gradcomp_jax import _compat
from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.dealing import Deal

SWITCH = "GRADCOMP_PALLAS"
"""The environment variable that enables these kernels; it is read when a program is traced."""

_SUBLANES, _LANES = 8, 128  # of a tile
_TILE = 2**18  # entries of the matrix in one step of the grid
_TABLE = 2**19  # blocks: two tables and a tile, each twice, fit 16 MiB of vector memory
_UNROLLED = 2**15  # entries of a row, whose parts are unrolled


def takes(deal: Deal, width: int) -> bool:
    """Returns whether these kernels are enabled, and support a matrix ``[size / width, width]``.

    Raises:
        ValueError: if the environment variable is neither 0 nor 1.
    """
    asked = os.environ.get(SWITCH, "0")
    if asked not in ("0", "1"):
        raise ValueError(f"{SWITCH} must be 0 or 1, got {asked!r}")
    lines = width % _LANES == 0 and width <= deal.rows and deal.size % width == 0
    fits = deal.rows <= _TABLE and width <= _UNROLLED and deal.size <= 2**31 - 64 * _TILE
    return asked == "1" and lines and fits


def best_of_dealt(matrix: Array, deal: Deal, low_bits: int, interpret: bool = False) -> Array:
    """Returns the best key of every block, in one pass.

    Args:
        matrix: float32 ``[size / width, width]``, a width that :func:`takes` allows.
        deal: how its entries are dealt.
        low_bits: the bits of a key for position and sign.
        interpret: runs anywhere, slowly.

    Returns:
        int32 ``[rows]``: exponent and mantissa without the low bits, position and sign, as in ``selection``.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    height, width = matrix.shape
    tile, length, parts = _tile(height, width), _length(deal, width), width // _LANES

    def kernel(matrix_ref: Any, best_ref: Any) -> None:
        step, (row, lane) = pl.program_id(0), _iotas()

        @pl.when(step == 0)
        def _() -> None:
            best_ref[...] = jnp.full(best_ref.shape, -1, jnp.int32)

        def eight_rows(c: Array, carry: None) -> None:
            first = step * tile + c * _SUBLANES
            line, at, begin, offset = _start(first, width, deal.rows)

            def update(part: int, keys: Array) -> None:
                place = pl.ds(begin + part, _SUBLANES, stride=parts)
                best_ref[place, :] = jnp.maximum(best_ref[place, :], keys)

            before = jnp.full((_SUBLANES, _LANES), -1, jnp.int32)
            for part in range(parts):
                inside = (pl.ds(pl.multiple_of(c * _SUBLANES, _SUBLANES), _SUBLANES), pl.ds(part * _LANES, _LANES))
                bits = lax.bitcast_convert_type(matrix_ref[inside], jnp.int32)
                along, position = at + row * width + part * _LANES + lane, line
                for turn in range(1, (deal.rows + _SUBLANES * width - 2) // deal.rows + 1):
                    position = position + (along >= turn * deal.rows).astype(jnp.int32)
                negative = lax.shift_right_logical(bits, jnp.full_like(bits, 31))
                keys = (bits & jnp.int32(0x7FFFFFFF & -(1 << low_bits))) | (position << 1) | negative
                keys = pltpu.roll(jnp.where(first + row < height, keys, -1), offset, 1)
                update(part, jnp.where(lane >= offset, keys, before))
                before = keys
            update(parts, jnp.where(lane < offset, before, -1))

        lax.fori_loop(0, tile // _SUBLANES, eight_rows, None)

    best = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(height, tile),),
        in_specs=[pl.BlockSpec((tile, width), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((length, _LANES), lambda i: (0, 0)),
        out_shape=_compat.shape_like(matrix, (length, _LANES), jnp.int32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="best_of_dealt",
    )(matrix)
    turns = -(-best.size // deal.rows)
    around = jnp.pad(best.reshape(-1), (0, turns * deal.rows - best.size), constant_values=-1)
    # Zeros beyond the vector's end are entries too, and of equal entries the last is best: it is in the last line.
    last = (deal.block - 1) * deal.rows + lax.iota(jnp.int32, deal.rows)
    return jnp.maximum(around.reshape(turns, -1).max(axis=0), jnp.where(last >= deal.size, (deal.block - 1) << 1, -1))


def placed_in_matrix(index: Array, value: Array, deal: Deal, width: int, interpret: bool = False) -> Array:
    """Returns each block's ``value`` at ``index``, zeros elsewhere, in one pass: ``[size / width, width]`` of its dtype.

    Args:
        index: int32 ``[rows]``.
        value: float32 or bfloat16 ``[rows]``; with bfloat16, blocks have at most 2**15 entries.
        deal: how entries are dealt.
        width: one that :func:`takes` allows.
        interpret: runs anywhere, slowly.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    height, packed = deal.size // width, value.dtype == jnp.bfloat16
    tile, length = _tile(height, width), _length(deal, width)
    rows = 2 * _SUBLANES if packed else _SUBLANES

    def table(entries: Array, step: int) -> Array:
        """Returns a table along the blocks, which continues from the start with ``step`` added: int32 ``[length, 128]``."""
        turns = lax.iota(jnp.int32, -(-length * _LANES // deal.rows))
        around = entries[None, :] + (turns * jnp.int32(step))[:, None]
        return around.reshape(-1)[: length * _LANES].reshape(-1, _LANES)

    # One turn around the table is one line further. So positions there are one less, and are compared with the first entry's.
    if packed:
        low = lax.bitcast_convert_type(value, jnp.uint16).astype(jnp.int32)
        tables = [table((index << 16) | low, -(1 << 16))]
    else:
        tables = [table(index, -1), table(lax.bitcast_convert_type(value, jnp.int32), 0)]

    def kernel(*refs: Any) -> None:
        *tables, out_ref = refs
        step, lane = pl.program_id(0), _iotas()[1]

        def eight_rows(first: Array, part: int) -> Array:
            line, _, begin, offset = _start(first, width, deal.rows)
            back = lax.rem(_LANES - offset, _LANES)

            def along(ref: Any) -> Array:
                here, there = (ref[pl.ds(begin + part + d, _SUBLANES, stride=width // _LANES), :] for d in (0, 1))
                return pltpu.roll(jnp.where(lane >= offset, here, there), back, 1)

            found = [along(ref) for ref in tables]
            position, bits = (found[0] >> 16, found[0] << 16) if packed else found
            return lax.bitcast_convert_type(jnp.where(position == line, bits, 0), jnp.float32)

        def rows_of_a_tile(c: Array, carry: None) -> None:
            for part in range(width // _LANES):
                found = [eight_rows(step * tile + c * rows + s, part) for s in range(0, rows, _SUBLANES)]
                inside = (pl.ds(pl.multiple_of(c * rows, rows), rows), pl.ds(part * _LANES, _LANES))
                out_ref[inside] = jnp.concatenate(found).astype(value.dtype)

        # Entries beyond the matrix have no line, and are not written.
        lax.fori_loop(0, lax.div(jnp.minimum(tile, height - step * tile + rows - 1), rows), rows_of_a_tile, None)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(height, tile),),
        in_specs=[pl.BlockSpec(tables[0].shape, lambda i: (0, 0)) for _ in tables],
        out_specs=pl.BlockSpec((tile, width), lambda i: (i, 0)),
        out_shape=_compat.shape_like(tables[0], (height, width), value.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="place_dealt",
    )(*tables)


def _tile(height: int, width: int) -> int:
    """Returns the rows of the matrix in one step of the grid: whole tiles of bfloat16."""
    return max(16, min(_TILE // width, height) // 16 * 16)


def _length(deal: Deal, width: int) -> int:
    """Returns the rows of 128 blocks in a table: eight rows of the matrix may begin in any block and wrap around."""
    return -(-(deal.rows // _LANES + _SUBLANES * width // _LANES + 2) // _SUBLANES) * _SUBLANES


def _iotas() -> tuple[Array, Array]:
    row, lane = (lax.broadcasted_iota(jnp.int32, (_SUBLANES, _LANES), d) for d in (0, 1))
    return row, lane


def _start(first: Array, width: int, rows: int) -> tuple[Array, Array, Array, Array]:
    """Returns the line and the block in which a row of the matrix begins, and that block's row and lane in a table."""
    start = first * width
    line, at = lax.div(start, rows), lax.rem(start, rows)
    return line, at, lax.div(at, _LANES), lax.rem(at, _LANES)
