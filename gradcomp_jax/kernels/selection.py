"""Selects the entries to send: the largest of each row."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.best import best_at_once
from gradcomp_jax.kernels.platforms import on_cpu
from gradcomp_jax.kernels.reductions import max_of_lanes, max_of_rows

ROUNDS = 8
"""Up to this many entries are found one after the other; twice as many where lanes reduce the row first."""

LANES = 16
"""Lanes for each wanted entry: few of the largest then share a lane."""

COMPARED = 16
"""Up to this many entries of a row are placed by comparing positions, on accelerators; on CPU up to :data:`ROUNDS`."""

_TURNS = 16
"""Number of stretches in a part of a row."""

_ONE_EXPONENT = 1 << 23  # of a float32


def _keys(rows: Array, low_bits: int) -> Array:
    """Returns an int32 key for each entry, ordered as the magnitudes are, with its position in its row and its sign.

    The low ``low_bits`` bits of the mantissa are replaced by the sign (the lowest bit) and the position.
    """
    bits = lax.bitcast_convert_type(rows, jnp.int32)
    position = lax.broadcasted_iota(jnp.int32, rows.shape, 1)
    negative = lax.shift_right_logical(bits, jnp.int32(31))
    return (bits & jnp.int32(0x7FFFFFFF & -(1 << low_bits))) | (position << 1) | negative


def _low_bits(block: int) -> int:
    return max(1, (block - 1).bit_length()) + 1


def _best_keys(rows: Array, k: int) -> Array:
    """Returns the ``k`` best keys of every row, int32 ``[rows, k]``."""
    low_bits = _low_bits(rows.shape[1])
    keys = _keys(rows, low_bits)
    if k == 1:
        return max_of_rows(keys)[:, None]
    return lax.platform_dependent(
        keys,
        tpu=functools.partial(approximate_best, k=k, low_bits=low_bits),
        cuda=functools.partial(_best_on_gpu, k=k),
        default=functools.partial(_best_in_parts, k=k),
    )


def approximate_best(keys: Array, *, k: int, low_bits: int) -> Array:
    """Runs TPU's own approximate top-k (Chern et al., 2022, https://arxiv.org/abs/2206.14286) over keys.

    The compiler counts fewer passes for it than for several maxima; for one entry a single maximum of keys is cheaper.

    It takes floats, so keys become positive normal numbers below 4 in the same order: they are shifted by one bit, which costs
    the lowest bit of the magnitude, and raised by one exponent. A NaN would not be ordered, and a subnormal would lose its
    position.
    """
    position_and_sign = (1 << low_bits) - 1
    low = keys & jnp.int32(position_and_sign)
    ordered = (((keys >> 1) & jnp.int32(~position_and_sign)) | low) + jnp.int32(_ONE_EXPONENT)
    best = lax.approx_max_k(lax.bitcast_convert_type(ordered, jnp.float32), k)[0]
    found = lax.bitcast_convert_type(best, jnp.int32) - jnp.int32(_ONE_EXPONENT)
    return ((found & jnp.int32(~position_and_sign)) << 1) | (found & jnp.int32(position_and_sign))


def _best_on_gpu(keys: Array, *, k: int) -> Array:
    # Exact, in one pass.
    return jnp.stack(best_at_once(keys, k), axis=1) if k <= ROUNDS else _best_in_parts(keys, k=k)


def _best_in_parts(keys: Array, *, k: int) -> Array:
    n, block = keys.shape
    # Where lanes reduce the row, a round reads little, so more rounds are affordable: longer parts miss less.
    rounds = 4 * ROUNDS if 4 * LANES * k <= block else 2 * ROUNDS if LANES * k < block else ROUNDS
    parts = parts_of(block, k, rounds) or 1
    if parts > 1 and block % (_TURNS * parts) == 0:
        # Each part has stretches from all over the row, so neighbours that are large together are spread over the parts.
        keys = keys.reshape(n, _TURNS, parts, -1).swapaxes(1, 2)
    return _best_of_part(keys.reshape(n * parts, block // parts), k // parts, rounds).reshape(n, k)


def parts_of(block: int, k: int, rounds: int) -> int | None:
    """Returns the number of equal parts of a row, each with at most ``rounds`` wanted entries; ``None`` if there is none."""
    return next((p for p in range(1, k + 1) if block % p == 0 and k % p == 0 and k // p <= rounds), None)


def _best_of_part(keys: Array, k: int, rounds: int) -> Array:
    block = keys.shape[1]
    if k == 1:
        return max_of_rows(keys)[:, None]
    # One pass finds the best of each lane; then the best lanes are found. With 16 lanes for each wanted entry, few of the
    # largest share a lane, and an entry that is missed stays behind and takes part in the next step.
    lanes = 64
    while lanes < LANES * k:
        lanes *= 2
    if block % lanes == 0 and block > 2 * lanes and k <= rounds:
        # Entries a multiple of the lanes apart share a lane, neighbours share a run; few entries share both.
        runs = max_of_rows(keys.reshape(-1, block // lanes)).reshape(keys.shape[0], lanes)
        keys = jnp.concatenate([max_of_lanes(keys, lanes), runs], axis=1)
    if k > rounds:
        # Keys are read as float32, whose order is that of the bits here: for integers backends sort the whole row, which is
        # several times slower.
        place = lax.top_k(lax.bitcast_convert_type(keys, jnp.float32), k)[1]
        return jnp.take_along_axis(keys, place, axis=1)
    in_turn = functools.partial(_found_in_turn, k=k)
    if k <= ROUNDS:
        return in_turn(keys)
    # On GPU so many rounds, a kernel each, cost more than a sort of the reduced row.
    return lax.platform_dependent(keys, cuda=functools.partial(_sorted_once, k=k), default=in_turn)


def _found_in_turn(keys: Array, *, k: int) -> Array:
    best = [max_of_rows(keys)]
    for _ in range(k - 1):
        # Keys of one row are distinct, or the same entry's, so those below the last one exclude it.
        best.append(max_of_rows(jnp.where(keys < best[-1][:, None], keys, -1)))
    return jnp.stack(best, axis=1)


def _sorted_once(keys: Array, *, k: int) -> Array:
    # Negative keys rise as magnitudes fall. An entry occurs at most twice, as the best of its lane and of its run.
    best = lax.slice_in_dim(lax.sort(-keys, dimension=1, is_stable=False), 0, min(2 * k, keys.shape[1]), axis=1)
    again = jnp.pad(best[:, 1:] == best[:, :-1], ((0, 0), (1, 0)))
    return -lax.slice_in_dim(lax.sort(jnp.where(again, 1, best), dimension=1, is_stable=False), 0, k, axis=1)


def top_of_rows(rows: Array, k: int) -> Array:
    """Returns the positions of the ``k`` largest magnitudes of every row, approximately.

    Magnitudes are compared without their lowest ``log2(block) + 1`` mantissa bits: an entry counts as largest up to a relative
    difference of 2**-12 for a block of 1024. For ``k > 1`` and ``16 k`` below the block, the row is first reduced to the best
    of at least ``16 k`` interleaved lanes and of as many runs of neighbours. So a large entry is missed if larger ones share
    both its lane and its run. For more than 16 entries (32 where ``64 k`` is at most the block, 8 where ``16 k`` is not
    below the block) the row is cut into equal parts, each of which gives up to that many entries. So a part with more of the
    largest loses some. Where block and k have no such divisor, the row is sorted instead. On GPU up to 8 entries are found
    exactly. On TPU, for ``k > 1``, its own approximate top-k is used. :func:`recall` says how many are found. A selection
    need not be more exact: what is not sent stays behind.

    Args:
        rows: float32 ``[rows, block]``.
        k: at most ``block``.

    Returns:
        int32 ``[rows, k]``, distinct within a row.
    """
    return top_entries(rows, k)[0]


def top_entries(rows: Array, k: int) -> tuple[Array, Array]:
    """Returns :func:`top_of_rows` with the values, from one pass over the rows.

    Args:
        rows: float32 ``[rows, block]``; a row with a NaN or an infinity returns one.
        k: at most ``block``.

    Returns:
        ``(index, value)``: int32 and float32 ``[rows, k]``. Where 11 or fewer bits hold position and sign (a block of
        at most 1024), values lack those bits of the mantissa: they are the entries truncated to 12 bits. That matters little
        for a cast to bfloat16 (7 bits), and a residual accounts for it. For larger blocks they are the entries themselves.
    """
    n, block = rows.shape
    if n == 0:
        return jnp.zeros((0, k), jnp.int32), jnp.zeros((0, k), jnp.float32)
    low_bits = _low_bits(block)
    if low_bits > 20:
        index = lax.top_k(jnp.abs(rows), k)[1].astype(jnp.int32)
        return index, take_from_rows(rows, index)
    return entries_of(_best_keys(rows, k), low_bits, lambda index: take_from_rows(rows, index))


def entries_of(keys: Array, low_bits: int, take: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Returns the positions and values that keys name; ``take(index)`` gives values of which a key has too few bits."""
    # What follows is computed for every entry of a dense result: it must start from the found keys, not find them again.
    keys = lax.optimization_barrier(keys)
    index = (keys & jnp.int32((1 << low_bits) - 1)) >> 1
    if low_bits > 11:
        return index, take(index)
    value = (keys & jnp.int32(0x7FFFFFFF & -(1 << low_bits))) | (keys << 31)
    return index, lax.bitcast_convert_type(value, jnp.float32)


def recall(rows: Array, k: int) -> Array:
    """Returns the part of the true ``k`` largest of each row that :func:`top_of_rows` finds: float32 scalar in [0, 1].

    Args:
        rows: float32 ``[rows, block]``, at least one row.
        k: at most ``block``.
    """
    smallest = lax.top_k(jnp.abs(rows), k)[0][:, -1:]
    found = jnp.abs(take_from_rows(rows, top_of_rows(rows, k))) >= smallest
    return jnp.mean(found.astype(jnp.float32))


def take_from_rows(rows: Array, index: Array) -> Array:
    """Returns the values at ``index`` (int ``[rows, k]``) of each row: float32 ``[rows, k]``."""
    if rows.shape[0] == 0:
        return jnp.zeros(index.shape, rows.dtype)
    index = index.astype(jnp.int32)
    if rows.dtype != jnp.float32 or index.shape[1] > COMPARED:
        return _gathered(rows, index)
    # TPU's compiler counts a gather as many passes, and a reduction to each of the entries as one.
    return lax.platform_dependent(rows, index, tpu=taken_by_comparing, default=_gathered)


def _gathered(rows: Array, index: Array) -> Array:
    return jnp.take_along_axis(rows, index, axis=1)


def taken_by_comparing(rows: Array, index: Array) -> Array:
    """Returns :func:`take_from_rows` of float32, bit by bit, as sums over a row in which all other entries are zero."""
    position = lax.broadcasted_iota(jnp.int32, rows.shape, 1)
    # Integers, because a sum of floats would lose the sign of a zero.
    bits = lax.bitcast_convert_type(rows, jnp.int32)
    found = [
        jnp.sum(jnp.where(position == index[:, j, None], bits, 0), axis=1, dtype=jnp.int32)
        for j in range(index.shape[1])
    ]
    return lax.bitcast_convert_type(jnp.stack(found, axis=1), jnp.float32)


def place_in_rows(index: Array, value: Array, block: int, into: Array | None = None) -> Array:
    """Returns dense rows with ``value`` added at ``index``; positions are distinct within a row.

    Args:
        index: integer ``[rows, k]``.
        value: float32 ``[rows, k]``.
        block: length of a row.
        into: float32 ``[rows, block]`` to add to; zeros by default.
    """
    n, k = index.shape

    def scattered(index: Array, value: Array) -> Array:
        base = jnp.zeros((n, block), jnp.float32) if into is None else into
        row = lax.broadcasted_iota(jnp.int32, (n, k), 0)
        return base.at[row, index.astype(jnp.int32)].add(value, unique_indices=True, mode="promise_in_bounds")

    if into is not None or k > COMPARED:
        return scattered(index, value)
    if k <= ROUNDS:
        return placed_by_comparing(index, value, block)
    return on_cpu(scattered, functools.partial(placed_by_comparing, block=block), index, value)


def placed_by_comparing(index: Array, value: Array, block: int, axis: int = 1) -> Array:
    """Returns :func:`place_in_rows` with the block along an axis, 0 or 1, by comparing every position with those of its row.

    That fuses with the operation that uses the rows; a scatter would be a separate pass.
    """
    position = lax.broadcasted_iota(jnp.int32, (index.shape[0], block) if axis else (block, index.shape[0]), axis)

    def one_by_one(index: Array, value: Array) -> Array:
        dense = jnp.zeros(position.shape, value.dtype)
        for j in range(index.shape[1]):
            here, entry = (jnp.expand_dims(a[:, j], axis) for a in (index, value))
            dense = jnp.where(position == here.astype(jnp.int32), entry, dense)
        return dense

    def summed(index: Array, value: Array) -> Array:
        entries = [jnp.expand_dims(a if axis else a.T, 1 + axis) for a in (index.astype(jnp.int32), value)]
        found = jnp.where(entries[0] == jnp.expand_dims(position, axis), entries[1], jnp.zeros((), value.dtype))
        return jnp.sum(found, axis=axis, dtype=value.dtype)

    if index.shape[1] <= ROUNDS:
        return one_by_one(index, value)
    # At most one term is not zero. GPU fuses a sum too, and compiles it once; TPU counts more passes for it.
    return lax.platform_dependent(index, value, cuda=summed, default=one_by_one)


def mark_in_rows(index: Array, block: int) -> Array:
    """Returns boolean ``[rows, block]``, true at ``index`` (int32 ``[rows, k]``); a negative index marks nothing."""
    n, k = index.shape

    def scattered(index: Array) -> Array:
        row = lax.broadcasted_iota(jnp.int32, (n, k), 0)
        # A place beyond the end, because a negative index would count from the end.
        place = jnp.where(index < 0, block, index)
        return jnp.zeros((n, block), bool).at[row, place].set(True, mode="drop")

    def compared(index: Array) -> Array:
        position = lax.broadcasted_iota(jnp.int32, (n, block), 1)
        marks = jnp.zeros((n, block), bool)
        for j in range(k):
            marks = marks | (position == index[:, j : j + 1])
        return marks

    if k > COMPARED:
        return scattered(index)
    return compared(index) if k <= ROUNDS else on_cpu(scattered, compared, index)


def exact_top_of_rows(rows: Array, k: int) -> Array:
    """Returns the positions of the ``k`` largest magnitudes of every row, by sorting: int32 ``[rows, k]``, largest first."""
    return lax.top_k(jnp.abs(rows), k)[1].astype(jnp.int32)
