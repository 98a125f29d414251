"""Pallas kernels for dealt blocks on TPU: they find the largest entry of each block, and place it, in the tiles of a matrix.

Neighbours in a row of the matrix are in neighbouring blocks, so a row is a stretch of a table along the blocks. A tile of
8 x 128 entries is 8 stretches, one for each row of the matrix: a load with a stride, and a rotation, because a stretch may
begin at any of 128 lanes. XLA:TPU copies the matrix to the layout of dealt lines instead, and back.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax import _compat, _registered
from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.dealing import Deal

SWITCH = "GRADCOMP_PALLAS"
"""The environment variable that enables these kernels (1) or not (0); by default a check on the TPU decides (auto). It is read
when a program is traced."""

_SUBLANES, _LANES = 8, 128  # of a tile
_TILE = 2**18  # entries of the matrix in one step of the grid
_TABLE = 2**19  # blocks: a table and tiles of three arrays, each twice, fit 16 MiB of vector memory
MOST_AROUND = 2**19  # words of a table that is written, which is there twice
_TABLES = 2**21  # words of tables, which are there once, beside tiles
_FEWEST = _SUBLANES * _LANES  # blocks: what goes around is taken back a tile at a time
_UNROLLED = 2**15  # entries of a row, whose parts are unrolled


@_registered.node
@dataclasses.dataclass(frozen=True)
class Parts:
    """Says what a float32 matrix is made of, so that a kernel makes it where it reads it, and nobody writes it.

    Attributes:
        arrays: float32, of the matrix's shape.
        make: returns the matrix, or a tile of it, given those of all arrays. It holds no other array.
    """

    arrays: tuple[Array, ...]
    make: Callable[..., Array] = dataclasses.field(default=lambda x: x, metadata={"static": True})


def takes(deal: Deal, width: int, tables: int = 1) -> bool:
    """Returns whether these kernels are used for a matrix ``[size / width, width]``, with so many words for each block."""
    lines = width % _LANES == 0 and max(width, _FEWEST) <= deal.rows and deal.size % width == 0
    fits = deal.rows <= _TABLE and tables * deal.rows <= _TABLES
    return lines and fits and width <= _UNROLLED and deal.size <= 2**31 - 64 * _TILE and _are_used()


def _are_used() -> bool:
    """Returns what the environment asks for, or what a check says.

    Raises:
        ValueError: if the environment variable is neither 0, 1 nor auto.
    """
    asked = os.environ.get(SWITCH, "auto")
    if asked not in ("0", "1", "auto"):
        raise ValueError(f"{SWITCH} must be 0, 1 or auto, got {asked!r}")
    if asked != "auto" or jax.default_backend() != "tpu":
        return asked == "1"
    from gradcomp_jax.kernels import self_check

    return self_check.passed()


def best_of_dealt(
    parts: Parts, deal: Deal, low_bits: int, lines: int | None = None, apart: int = 1, interpret: bool = False
) -> Array:
    """Returns the best key of every block, of the whole matrix or of each run of lines, in one pass.

    Args:
        parts: what a float32 matrix ``[size / width, width]`` is made of, of a width that :func:`takes` allows.
        deal: how its entries are dealt.
        low_bits: the bits of a key for position and sign.
        lines: about as many lines, of which a block has an entry each, are in a run; ``None`` for all.
        apart: the distance from one line of a run to the next; runs of neighbours lie side by side.
        interpret: runs anywhere, slowly.

    Returns:
        int32 ``[stretches, n / 128, 128]``: of each stretch of the tensor the first ``apart * rows`` of the n are those of the
        runs that begin there, in the blocks' order. They are exponent and mantissa without the low bits, position and sign, as
        in ``selection``.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    height, width = parts.arrays[0].shape
    around = apart * deal.rows
    length, across = _length(around, width), width // _LANES
    tile, tiles = _tiles(height, width, len(parts.arrays), None if lines is None else lines * around)
    stretches = pl.cdiv(height, tile * tiles)

    def kernel(*refs: Any) -> None:
        *sources, best_ref = refs
        step, (row, lane) = pl.program_id(0) * tiles + pl.program_id(1), _iotas()

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            best_ref[...] = jnp.full(best_ref.shape, -1, jnp.int32)

        def eight_rows(c: Array, carry: None) -> None:
            first = step * tile + c * _SUBLANES
            line, at, *_ = _start(first, width, deal.rows)
            *_, begin, offset = _start(first, width, around)

            def update(part: int, keys: Array) -> None:
                place = pl.ds(begin + part, _SUBLANES, stride=across)
                best_ref[place, :] = jnp.maximum(best_ref[place, :], keys)

            before = jnp.full((_SUBLANES, _LANES), -1, jnp.int32)
            for part in range(across):
                inside = (pl.ds(pl.multiple_of(c * _SUBLANES, _SUBLANES), _SUBLANES), pl.ds(part * _LANES, _LANES))
                bits = lax.bitcast_convert_type(parts.make(*(ref[inside] for ref in sources)), jnp.int32)
                along, position = at + row * width + part * _LANES + lane, line
                for turn in range(1, (deal.rows + _SUBLANES * width - 2) // deal.rows + 1):
                    position = position + (along >= turn * deal.rows).astype(jnp.int32)
                negative = lax.shift_right_logical(bits, jnp.full_like(bits, 31))
                keys = (bits & jnp.int32(0x7FFFFFFF & -(1 << low_bits))) | (position << 1) | negative
                keys = pltpu.roll(jnp.where(first + row < height, keys, -1), offset, 1)
                update(part, jnp.where(lane >= offset, keys, before))
                before = keys
            update(across, jnp.where(lane < offset, before, -1))

        lax.fori_loop(0, tile // _SUBLANES, eight_rows, None)

        @pl.when(pl.program_id(1) == tiles - 1)
        def _() -> None:
            # What went around is taken to where it belongs, from the end, as it may have gone around several times.
            whole, offset = divmod(around, _LANES)
            chunks = (length - whole - 1) // _SUBLANES

            def eight_back(c: Array, carry: None) -> None:
                to = (chunks - 1 - c) * _SUBLANES
                here, there = (best_ref[pl.ds(whole + to + d, _SUBLANES), :] for d in (0, 1))
                back = pltpu.roll(jnp.where(lane >= offset, here, there), (_LANES - offset) % _LANES, 1)
                place = pl.ds(pl.multiple_of(to, _SUBLANES), _SUBLANES)
                best_ref[place, :] = jnp.maximum(best_ref[place, :], back)

            lax.fori_loop(0, chunks, eight_back, None)

    last = pl.cdiv(height, tile) - 1
    best = pl.pallas_call(
        kernel,
        grid=(stretches, tiles),
        in_specs=[pl.BlockSpec((tile, width), lambda i, j: (jnp.minimum(i * tiles + j, last), 0))] * len(parts.arrays),
        out_specs=pl.BlockSpec((None, length, _LANES), lambda i, j: (i, 0, 0)),
        out_shape=_compat.shape_like(parts.arrays[0], (stretches, length, _LANES), jnp.int32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="best_of_dealt",
    )(*parts.arrays)
    # A vector would lie in other tiles. Zeros beyond the end of the dealt vector are entries too: of equal entries the last is
    # the best, and it is in the last line.
    if lines is not None:
        return best
    number = lax.iota(jnp.int32, length * _LANES).reshape(1, length, _LANES) + (deal.block - 1) * deal.rows
    return jnp.maximum(best, jnp.where(number >= deal.size, (deal.block - 1) << 1, -1))


def placed_in_matrix(
    index: Array, value: Array, deal: Deal, width: int, dtype: Any = None, interpret: bool = False
) -> Array:
    """Returns each block's ``value`` at ``index``, zeros elsewhere, in one pass: ``[size / width, width]``.

    Args:
        index: int32 ``[rows, k]``, distinct within a row.
        value: float32 or bfloat16 ``[rows, k]``; with bfloat16, blocks have at most 2**15 entries.
        deal: how entries are dealt.
        width: one that :func:`takes` allows.
        dtype: of the result, float32 or the value's; by default the value's.
        interpret: runs anywhere, slowly.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    dtype = value.dtype if dtype is None else jnp.dtype(dtype)
    height, packed, k = deal.size // width, value.dtype == jnp.bfloat16, index.shape[1]
    tile, length = _tile(height, width), _length(deal.rows, width)
    rows = 2 * _SUBLANES if dtype == jnp.bfloat16 else _SUBLANES

    def table(entries: Array, step: int) -> Array:
        """Returns k tables along the blocks, which continue from the start with ``step`` added: int32 ``[k length, 128]``."""
        turns = lax.iota(jnp.int32, -(-length * _LANES // deal.rows))
        around = entries.T[:, None, :] + (turns * jnp.int32(step))[None, :, None]
        return around.reshape(k, -1)[:, : length * _LANES].reshape(-1, _LANES)

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

            def along(ref: Any, j: int | Array) -> Array:
                first = j * length + begin + part
                here, there = (ref[pl.ds(first + d, _SUBLANES, stride=width // _LANES), :] for d in (0, 1))
                return pltpu.roll(jnp.where(lane >= offset, here, there), back, 1)

            def with_entry(j: int | Array, total: Array) -> Array:
                found = [along(ref, j) for ref in tables]
                position, bits = (found[0] >> 16, found[0] << 16) if packed else found
                return jnp.where(position == line, bits, total)

            none = jnp.zeros((_SUBLANES, _LANES), jnp.int32)
            total = with_entry(0, none) if k == 1 else lax.fori_loop(0, k, with_entry, none)
            return lax.bitcast_convert_type(total, jnp.float32)

        def rows_of_a_tile(c: Array, carry: None) -> None:
            for part in range(width // _LANES):
                found = [eight_rows(step * tile + c * rows + s, part) for s in range(0, rows, _SUBLANES)]
                inside = (pl.ds(pl.multiple_of(c * rows, rows), rows), pl.ds(part * _LANES, _LANES))
                out_ref[inside] = jnp.concatenate(found).astype(dtype)

        # Entries beyond the matrix have no line, and are not written.
        lax.fori_loop(0, lax.div(jnp.minimum(tile, height - step * tile + rows - 1), rows), rows_of_a_tile, None)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(height, tile),),
        in_specs=[pl.BlockSpec(t.shape, lambda i: (0, 0), pipeline_mode=pl.Buffered(1)) for t in tables],
        out_specs=pl.BlockSpec((tile, width), lambda i: (i, 0)),
        out_shape=_compat.shape_like(tables[0], (height, width), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="place_dealt",
    )(*tables)


def _tile(height: int, width: int) -> int:
    """Returns the rows of the matrix in one step of the grid: whole tiles of bfloat16."""
    return max(16, min(_TILE // width, height) // 16 * 16)


def _tiles(height: int, width: int, arrays: int, entries: int | None) -> tuple[int, int]:
    """Returns the rows of a tile of each of some float32 arrays, and how many tiles a stretch of about so many entries has.

    ``None`` for one stretch.
    """
    tile = max(_SUBLANES, min(_TILE // arrays // width, height) // _SUBLANES * _SUBLANES)
    if entries is None:
        return tile, -(-height // tile)
    wanted = max(_SUBLANES, entries // width)
    tiles = max(1, round(wanted / tile))
    return max(_SUBLANES, wanted // tiles // _SUBLANES * _SUBLANES), tiles


def _length(entries: int, width: int) -> int:
    """Returns the rows of 128 in a table of so many entries: eight rows of the matrix may begin anywhere and go around."""
    return (-(-(entries // _LANES + _SUBLANES * width // _LANES + 2) // _SUBLANES) + 1) * _SUBLANES


def _iotas() -> tuple[Array, Array]:
    row, lane = (lax.broadcasted_iota(jnp.int32, (_SUBLANES, _LANES), d) for d in (0, 1))
    return row, lane


def _start(first: Array, width: int, rows: int) -> tuple[Array, Array, Array, Array]:
    """Returns the line and the block in which a row of the matrix begins, and that block's row and lane in a table."""
    start = first * width
    line, at = lax.div(start, rows), lax.rem(start, rows)
    return line, at, lax.div(at, _LANES), lax.rem(at, _LANES)
