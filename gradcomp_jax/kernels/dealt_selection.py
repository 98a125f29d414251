"""The largest entries of blocks that are dealt out over a vector, and their places in it."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp_jax._typing import Array
from gradcomp_jax.kernels import dealt_on_tpu
from gradcomp_jax.kernels.best import best_at_once
from gradcomp_jax.kernels.dealing import Deal
from gradcomp_jax.kernels.platforms import in_rows
from gradcomp_jax.kernels.selection import (
    COMPARED,
    LANES,
    ROUNDS,
    _keys,
    _low_bits,
    approximate_best,
    entries_of,
    parts_of,
    place_in_rows,
    placed_by_comparing,
    take_from_rows,
    top_entries,
)

_LINES = 16
"""Most lines that are reduced in one step: for more, XLA's CPU backend makes a slow loop."""

_LARGEST = 2**31 - 1

_Placing = Callable[[Array, Array], Array]


def top_of_dealt(flat: Array, deal: Deal, k: int, parts: dealt_on_tpu.Parts | None = None) -> tuple[Array, Array]:
    """Returns :func:`~gradcomp_jax.kernels.selection.top_entries` of every dealt block, without transposing the vector.

    A vector, float32 ``[size]``, is seen as lines of ``deal.rows`` neighbours. Each line has one entry of every block; maxima
    are over lines. ``parts`` is what the vector is made of, as a matrix ``[size / block, block]``, for a kernel. The result is
    ``(index, value)``, int32 and float32 ``[rows, k]``.
    """
    low_bits = _low_bits(deal.block)
    lines = _run(deal.block, k)
    if not reduces_lines(deal.block, k):
        return top_entries(deal.blocks(flat), k)

    def in_lines(flat: Array) -> Array:
        return _best_of_lines(flat, deal, k, lines, low_bits)

    def at_once(flat: Array) -> Array:
        return _best_of_all([_at_once(flat, deal, k)], k)

    def in_one_layout(flat: Array) -> Array:
        # TPU's tiles of lines are not those of the vector: only one array should change between them, the vector itself.
        whole = deal.size // deal.rows
        first = lax.optimization_barrier(flat[: whole * deal.rows].reshape(whole, deal.rows))
        found = _best_of_runs(first.reshape(-1), 0, deal.rows, whole, 1, low_bits)
        if whole < deal.block:
            rest = jnp.pad(flat[whole * deal.rows :], (0, deal.block * deal.rows - deal.size))
            found = jnp.maximum(found, _best_of_runs(rest, whole, deal.rows, deal.block - whole, 1, low_bits))
        return found.T

    def approximate(flat: Array) -> Array:
        return approximate_best(_keys(deal.blocks(flat), low_bits), k=k, low_bits=low_bits)

    def by_kernel(flat: Array) -> Array:
        return _by_kernel(parts or dealt_on_tpu.Parts((flat.reshape(-1, deal.block),)), deal, k)

    by_xla = in_one_layout if k == 1 else approximate
    tpu = by_kernel if k <= COMPARED and dealt_on_tpu.takes(deal, deal.block) else by_xla
    keys = lax.platform_dependent(flat, cpu=in_lines, tpu=tpu, default=at_once)
    return entries_of(keys, low_bits, lambda index: take_dealt(flat, deal, index))


def top_of_all_dealt(flats: Sequence[Array], deals: Sequence[Deal], k: int) -> tuple[Array, Array]:
    """Returns :func:`top_of_dealt` of several vectors with blocks of one length, found together: those of the rows of all.

    For accelerators, where the rounds of each vector would be as many kernels. :func:`reduces_lines` of the block is true.
    """
    block, found = deals[0].block, [_at_once(*one, k) for one in zip(flats, deals, strict=True)]
    keys = _best_of_all([jnp.concatenate(found, axis=1)], k)
    return entries_of(keys, _low_bits(block), lambda index: take_all_dealt(flats, deals, index))


def reduces_lines(block: int, k: int) -> bool:
    """Returns whether lines are reduced; otherwise there is nothing to reduce, or rows are sorted: they are taken as rows."""
    lines = _run(block, k)
    return _low_bits(block) <= 20 and lines > 1 and parts_of(block // lines, k, 2 * ROUNDS) is not None


def _at_once(flat: Array, deal: Deal, k: int) -> Array:
    """Returns the best key of every block in each run of lines: int32 ``[runs, rows]``.

    All lines are in one reduction, which also fills up the vector: each part of it would be a separate pass.
    """
    run = deal.block if k == 1 else _run(deal.block, k)
    return _best_of_runs(
        deal.lines(flat).reshape(-1), 0, deal.rows, run, _apart(deal.block, k, run), _low_bits(deal.block)
    )


def _run(block: int, k: int) -> int:
    """Returns how many lines are reduced in one step; as many maxima are left as :func:`top_entries` wants lanes."""
    run = _LINES
    while run > 1 and (block % run or (k > 1 and block // run < (LANES if k <= 2 * ROUNDS else LANES // 2) * k)):
        run //= 2
    return run


def _by_kernel(parts: dealt_on_tpu.Parts, deal: Deal, k: int) -> Array:
    """Returns the ``k`` best keys of every block, int32 ``[rows, k]``, of candidates that a kernel finds in one pass."""
    low_bits = _low_bits(deal.block)
    if k == 1:
        return dealt_on_tpu.best_of_dealt(parts, deal, low_bits).reshape(-1)[: deal.rows, None]
    run, apart = _run_on_tpu(deal, k)
    found = dealt_on_tpu.best_of_dealt(parts, deal, low_bits, run, apart)
    found = found.reshape(found.shape[0], -1)[:, : apart * deal.rows]
    return _in_turn(found.reshape(-1, deal.rows), k=k, each=k)


def _run_on_tpu(deal: Deal, k: int) -> tuple[int, int]:
    """Returns how many lines are reduced to one entry of a block, and how far they are apart: see :func:`_apart`.

    The distance is odd: what is large in a tensor is so in steps of powers of two.
    """
    run = max(n for n in (1, 2, 4, 8, 16) if n == 1 or deal.block >= 8 * k * n)
    fits = [n for n in (1, 3, 7, 15, 31) if n * run <= deal.block and n * deal.rows <= dealt_on_tpu.MOST_AROUND]
    return run, max(fits)


def _best_of_lines(flat: Array, deal: Deal, k: int, run: int, low_bits: int) -> Array:
    """Returns the ``k`` best keys of every block, int32 ``[rows, k]``."""
    rows, block = deal.rows, deal.block
    apart = _apart(block, k, run)
    length = run * apart * rows
    whole = flat.size // length
    found = [_best_of_runs(flat[: whole * length], 0, rows, run, apart, low_bits)] if whole else []
    if whole * run * apart < block:
        # Only the lines at the vector's end are filled up: a padded vector would be read entry by entry.
        rest = flat[whole * length :]
        rest = jnp.pad(rest, (0, block * rows - flat.size))
        found.append(_best_of_runs(rest, whole, rows, run, apart, low_bits))
    return _best_of_all(found, k)


def _best_of_all(found: list[Array], k: int) -> Array:
    """Returns the ``k`` best of some runs' best keys, int32 ``[runs, rows]`` each: int32 ``[rows, k]``."""
    rows = found[0].shape[1]
    parts = parts_of(sum(len(f) for f in found), k, 2 * ROUNDS) or 1
    if parts > 1:
        found = [jnp.concatenate(found).reshape(parts, -1, rows).swapaxes(0, 1)]
    on_gpu, in_turn = (functools.partial(of, k=k, each=k // parts) for of in (_together, _in_turn))
    return in_turn(*found) if k == 1 else lax.platform_dependent(*found, cuda=on_gpu, default=in_turn)


def _in_turn(*found: Array, k: int, each: int) -> Array:
    best = [functools.reduce(jnp.maximum, [jnp.max(f, axis=0) for f in found])]
    for _ in range(each - 1):
        # Keys of one block are distinct, so those below the last one exclude it.
        below = [jnp.max(jnp.where(f < best[-1][None], f, -1), axis=0) for f in found]
        best.append(functools.reduce(jnp.maximum, below))
    return jnp.stack(best).reshape(k, -1).T


def _together(*found: Array, k: int, each: int) -> Array:
    # Rounds would be a kernel each.
    keys = jnp.concatenate(found)
    rows = in_rows(keys.reshape(len(keys), -1).T)
    best = jnp.stack(best_at_once(rows, each), axis=1)
    return best.reshape(k // each, -1, each).swapaxes(0, 1).reshape(-1, k)


def _apart(block: int, k: int, run: int) -> int:
    """Returns the distance in lines from one line of a run to the next.

    A block's entry in the next line may be in the next column, or in the same row. Where several entries are wanted, such
    neighbours should not be in one run.
    """
    apart = 1
    while k > 1 and block % (32 * apart * run) == 0:
        apart *= 2
    return apart


def _best_of_runs(flat: Array, first: int, rows: int, run: int, apart: int, low_bits: int) -> Array:
    """Returns the best key of every block in each run of lines: int32 ``[runs, rows]``."""
    lines = flat.reshape(-1, run, apart, rows)
    bits = lax.bitcast_convert_type(lines, jnp.int32)
    group, within, beside = (lax.broadcasted_iota(jnp.int32, lines.shape, d) for d in range(3))
    position = ((group + first) * run + within) * apart + beside
    negative = lax.shift_right_logical(bits, jnp.int32(31))
    keys = (bits & jnp.int32(0x7FFFFFFF & -(1 << low_bits))) | (position << 1) | negative
    return lax.optimization_barrier(jnp.max(keys, axis=1)).reshape(-1, rows)


def take_dealt(flat: Array, deal: Deal, index: Array) -> Array:
    """Returns each block's values at ``index`` (int32 ``[rows, k]``): float32 ``[rows, k]``; 0 beyond the vector's end."""
    if deal.size > _LARGEST:
        return take_from_rows(deal.blocks(flat), index)
    place = _places(index, deal)
    return jnp.where(place < deal.size, flat[jnp.minimum(place, deal.size - 1)], 0.0)


def take_all_dealt(flats: Sequence[Array], deals: Sequence[Deal], index: Array) -> Array:
    """Returns :func:`take_dealt` of several vectors, whose rows ``index`` has one after the other."""
    ends = list(itertools.accumulate(deal.rows for deal in deals))[:-1]
    each = zip(flats, deals, jnp.split(index, ends), strict=True)
    return jnp.concatenate([take_dealt(*one) for one in each])


def place_dealt(index: Array, value: Array, deal: Deal, width: int) -> Array:
    """Returns a vector with each block's ``value`` at ``index`` and zeros elsewhere: float32 ``[size / width, width]``.

    Args:
        index: int32 ``[rows, k]``, distinct within a row.
        value: float32 ``[rows, k]``.
        deal: how entries are dealt.
        width: width of the matrix that the vector is seen as; divides its size.
    """
    k = index.shape[1]
    cpu = functools.partial(_on_cpu, deal=deal, width=width)
    if k > COMPARED:
        return cpu(index, value)
    return _on_platforms(cpu, functools.partial(_compared, deal=deal, width=width), index, value, deal, width)


def _on_cpu(index: Array, value: Array, deal: Deal, width: int) -> Array:
    """Returns :func:`place_dealt` as it is fastest on CPU."""
    k = index.shape[1]
    if k > ROUNDS and deal.size <= _LARGEST:
        zeros = jnp.zeros((deal.size,), jnp.float32)
        return zeros.at[_places(index, deal)].add(value, mode="drop", unique_indices=True).reshape(-1, width)
    if k > ROUNDS or not _fits(deal, width):
        return deal.flat(place_in_rows(index, value, deal.block)).reshape(-1, width)
    total, bits = jnp.zeros((deal.size // width, width), jnp.float32), lax.bitcast_convert_type(value, jnp.int32)
    for j in range(k):
        here, there = _along(index[:, j], deal, width), _along(bits[:, j], deal, width)
        line = _line_numbers(deal, width)
        total = jnp.where(here == line, lax.bitcast_convert_type(there, jnp.float32), total)
    return total


def place_packed(index: Array, value: Array, deal: Deal, width: int, *, wide: bool = False) -> Array:
    """Returns :func:`place_dealt` of bfloat16 values: position and value share a word, so one array is looked up.

    ``wide`` says that nothing is computed from the result: a kernel writes it in float32, else in bfloat16.
    """
    k = index.shape[1]

    def in_lines(index: Array, value: Array) -> Array:
        if k > ROUNDS:
            return _on_cpu(index, value.astype(jnp.float32), deal, width)
        total = jnp.zeros((deal.size // width, width), jnp.float32)
        first, _ = _begins(deal, width)
        for j in range(k):
            low = lax.bitcast_convert_type(value[:, j], jnp.uint16).astype(jnp.int32)
            word = (index[:, j] << 16) | low
            # A row of the matrix may end one line after the line that it begins in.
            there = _along(word, deal, width, second=-(1 << 16))
            total = jnp.where(there >> 16 == first, lax.bitcast_convert_type(there << 16, jnp.float32), total)
        return total

    def plain(index: Array, value: Array) -> Array:
        # Values stay bfloat16 until they lie as the matrix does: on TPU the change of layout then moves half the bytes.
        return _compared(index, value, deal, width).astype(jnp.float32)

    if k > COMPARED or deal.block > 2**15 or not _fits(deal, width):
        return place_dealt(index, value.astype(jnp.float32), deal, width)
    return _on_platforms(in_lines, plain, index, value, deal, width, jnp.float32 if wide else value.dtype)


def _on_platforms(
    cpu: _Placing, plain: _Placing, index: Array, value: Array, deal: Deal, width: int, dtype: Any = jnp.float32
) -> Array:
    """Returns ``cpu`` on CPU and ``plain``, the same numbers, elsewhere; on TPU those of a kernel where it is enabled."""

    def by_kernel(index: Array, value: Array) -> Array:
        return dealt_on_tpu.placed_in_matrix(index, value, deal, width, dtype).astype(jnp.float32)

    tables = index.shape[1] * (1 if value.dtype == jnp.bfloat16 else 2)
    tpu = by_kernel if dealt_on_tpu.takes(deal, width, tables) else plain
    return lax.platform_dependent(index, value, cpu=cpu, tpu=tpu, default=plain)


def _compared(index: Array, value: Array, deal: Deal, width: int) -> Array:
    """Returns :func:`place_dealt`, made line by line from the start: nothing is transposed."""
    lines = placed_by_comparing(index, value, deal.block, axis=0)
    return lines.reshape(-1)[: deal.size].reshape(-1, width)


def _fits(deal: Deal, width: int) -> bool:
    """Returns whether a row of the matrix lies in at most two lines, and places fit 32 bits."""
    return width <= deal.rows and deal.size <= _LARGEST


def _places(index: Array, deal: Deal) -> Array:
    """Returns the places in the vector of the entries at ``index`` of each block."""
    return lax.broadcasted_iota(jnp.int32, index.shape, 0) + deal.rows * index.astype(jnp.int32)


def _begins(deal: Deal, width: int) -> tuple[Array, Array]:
    """Returns the line and the block in which each row of the matrix begins: int32 ``[size / width, 1]``."""
    start = lax.broadcasted_iota(jnp.uint32, (deal.size // width, 1), 0) * np.uint32(width)
    return (start // np.uint32(deal.rows)).astype(jnp.int32), (start % np.uint32(deal.rows)).astype(jnp.int32)


def _line_numbers(deal: Deal, width: int) -> Array:
    """Returns the line of every entry of the matrix."""
    column = lax.broadcasted_iota(jnp.int32, (deal.size // width, width), 1)
    line, block = _begins(deal, width)
    return line + (column >= deal.rows - block).astype(jnp.int32)


def _along(table: Array, deal: Deal, width: int, second: int = 0) -> Array:
    """Returns the entry of a table ``[rows]`` for each entry's block: int32 ``[size / width, width]``.

    Neighbours in a row of the matrix are in neighbouring blocks. So a row is a stretch of the table followed by its beginning
    again (to which ``second`` is added), which the compiler loads as vectors. Each entry's block would take a division.
    """
    twice = jnp.concatenate([table, table[:width] + jnp.int32(second)])
    # It depends on the entry alone, and is an array in memory: fused, its two halves would be a branch for each entry.
    least = np.int32(-(2**31))
    twice = lax.reduce_window(twice, least, lax.max, (2,), (1,), ((0, twice.size),), window_dilation=(twice.size,))
    stretches = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(), start_index_map=(0,))
    mode = lax.GatherScatterMode.CLIP
    return lax.gather(twice, _begins(deal, width)[1], stretches, slice_sizes=(width,), mode=mode)
