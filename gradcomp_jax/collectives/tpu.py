"""What XLA:TPU needs of the same collectives: whole lanes, tensors apart, and an order that it keeps.

Nothing here changes a number. Elsewhere each of these is the plain operation: the choice is made when a program is lowered, and
only the branch of its platform is in it.

**Gathers and reduce-scatters.** XLA:TPU (libtpu 0.0.42) may carry out either as an all-reduce of the whole array, with
zeros instead of the other devices' parts, which sends twice the bytes. Compiled for v5e, v5p and v6e, an all-gather of any
dtype became an all-reduce in two cases. One is a shard whose entries are not a multiple of the 128 lanes, also between
slices, over the data-centre network. The other is a group of 64 devices or more within a slice, if the result is at most 16
MiB (on a three-dimensional torus, at any size). Compiled for slices of v5e and v6e joined by a data-centre network, a
reduce-scatter within a slice always became an all-reduce unless each device's shard was of whole pairs of tiles (8 rows of
128 lanes, one for each direction of a ring); with them only at a few sizes, on v5e. In a program of a single slice it
becomes one in any form.

**All-to-alls.** XLA:TPU (libtpu 0.0.42) takes a minute and more to compile an all-to-all of narrow words in long rows; the
longer the rows, the longer it takes. In rows of 128 lanes it takes seconds, and the program copies less.
``benchmarks/tpu.py --table passes --method block_quantized`` prints the effect on a whole update.

**Parts.** XLA removes a join that is followed by the same cuts: an array is cut into the tensors that it was joined from.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

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

    On TPU the shard is filled up to a multiple of :data:`LANES`, and crosses in rows of them: one row lies in tiles of four.
    Over a single axis of more than :data:`LARGEST_GROUP` devices it takes two steps, which send as many bytes as one.
    """

    def for_tpu(x: Array) -> Array:
        filled = jnp.pad(x, (0, -x.size % LANES))
        gathered = _all_gather_of_rows(filled.reshape(-1, LANES), axis_name)
        return lax.slice_in_dim(gathered.reshape(-1, filled.size), 0, x.size, axis=1)

    return lax.platform_dependent(x, tpu=for_tpu, default=lambda x: _compat.all_gather(x, axis_name))


def _all_gather_of_rows(rows: Array, axis_name: AxisName) -> Array:
    """Stacks every worker's rows of whole lanes, ``[n, width]``, as ``[N, n, width]``, replicated."""
    if first := _first_group(rows, axis_name):
        return in_two_steps(rows.reshape(-1), axis_name, first).reshape(-1, *rows.shape)
    return _compat.all_gather(rows, axis_name)


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


LONG = 2**17
"""An array of at least so many words for one device has its own rows of lanes. For shorter arrays that is too many kernels."""

LONG_SHARD = 2**22
"""A shard of at least so many words is gathered in rows of its own width. For shorter ones that is more kernels for little."""

WIDEST = 1024
"""Most entries of a row in which an array crosses: the longer the rows, the longer it takes to compile."""

MOST_BYTES = 2**30
"""Most bytes of one all-to-all on TPU. At 2^31 libtpu 0.0.42 ends the process, in any layout (seen for 256 chips of v5e)."""


def all_to_all(buffer: Array, axis_name: AxisName) -> Array:
    """Sends slice j of ``[N, ...]`` to worker j; slice i of the result came from worker i."""
    each = _compat.mapped(_compat.varying(buffer, axis_name), axis_name)
    return lax.all_to_all(each, axis_name, 0, 0, tiled=True)


def pays_in_lanes(arrays: Sequence[Array], lead: int = 1, width: int = LANES) -> bool:
    """Returns whether arrays ``[N, n]``, or ``[n]`` of wide rows, cross in lanes on TPU."""
    long = any(a.shape[lead] >= (LONG if lead else LONG_SHARD) for a in arrays)
    return long or sum(a.size * a.dtype.itemsize for a in arrays) > MOST_BYTES if lead else long and width > LANES


def width(arrays: Sequence[Array]) -> int:
    """Returns how wide the rows are in which arrays ``[..., block]`` cross: rows of another width lie in other tiles."""
    block = max(arrays, key=lambda a: a.size).shape[-1] if arrays else LANES
    return block if block % LANES == 0 and block <= WIDEST else LANES


def all_to_all_in_lanes(arrays: Sequence[Array], axis_name: AxisName, width: int = LANES) -> list[Array]:
    """Sends row j of every array ``[N, n]`` of one dtype to worker j, in one buffer ``[N, rows, width]``.

    A buffer of more than ``MOST_BYTES`` crosses in parts.
    """

    def cross(buffer: Array) -> Array:
        parts = jnp.array_split(buffer, max(1, -(-buffer.nbytes // MOST_BYTES)), axis=1)
        return jnp.concatenate([all_to_all(part, axis_name) for part in parts], axis=1)

    return _in_lanes(arrays, width, cross)


def all_gather_in_lanes(arrays: Sequence[Array], axis_name: AxisName, width: int) -> list[Array]:
    """Stacks every worker's arrays ``[n]`` of one dtype as ``[N, n]``, replicated, in one buffer ``[rows, width]``."""
    return _in_lanes([a[None] for a in arrays], width, lambda buffer: _all_gather_of_rows(buffer[0], axis_name))


def _in_lanes(arrays: Sequence[Array], width: int, cross: Callable[[Array], Array]) -> list[Array]:
    """Takes arrays ``[K, n]`` across as one buffer ``[K, rows, width]``, of which ``cross`` returns ``[N, rows, width]``.

    Each long array is filled up to whole rows; the others are filled up together.
    """
    long = [i for i, a in enumerate(arrays) if a.shape[1] >= LONG]
    short = [i for i in range(len(arrays)) if i not in long]
    together = [jnp.concatenate([arrays[i] for i in short], axis=1)] if short else []
    each = [_lanes_of(a, width) for a in [*(arrays[i] for i in long), *together]]
    crossed = cross(jnp.concatenate(each, axis=1))
    ends = list(itertools.accumulate((a.shape[1] for a in each), initial=0))
    rows = [crossed[:, start:end].reshape(crossed.shape[0], -1) for start, end in itertools.pairwise(ends)]
    result = {i: row[:, : arrays[i].shape[1]] for i, row in zip(long, rows, strict=False)}
    at = 0
    for i in short:
        result[i] = rows[-1][:, at : at + arrays[i].shape[1]]
        at += arrays[i].shape[1]
    return [result[i] for i in range(len(arrays))]


def _lanes_of(array: Array, width: int) -> Array:
    filled = jnp.pad(array, ((0, 0), (0, -array.shape[1] % width)))
    return filled.reshape(array.shape[0], -1, width)


Shapes = Sequence[tuple[int, ...]]

_MOST_WORKERS = 32
"""For up to so many workers each owns a part of every tensor on TPU: with more, thinner parts take more temporaries."""


def are_of(array: Array, shapes: Shapes) -> bool:
    """Returns whether an array, of rows of one entry, holds the entries of tensors of these shapes and nothing else."""
    return array.ndim > 0 and array.shape[0] == array.size == sum(math.prod(shape) for shape in shapes)


def cut(array: Array, shapes: Shapes) -> list[Array]:
    """Returns the tensors in their own shapes where :func:`are_of` is true; otherwise the array."""
    if not are_of(array, shapes):
        return [array]
    starts = itertools.accumulate((math.prod(shape) for shape in shapes), initial=0)
    return [lax.slice_in_dim(array, at, at + math.prod(s)).reshape(s) for at, s in zip(starts, shapes, strict=False)]


def joined(parts: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """Inverts :func:`cut`, to an array of a given shape."""
    return jnp.concatenate([p.reshape(-1, *shape[1:]) for p in parts]) if len(parts) > 1 else parts[0].reshape(shape)


def by_owner(array: Array, workers: int, each: int, in_turn: bool, shapes: Shapes) -> Array:
    """Returns the rows that each worker owns, ``[N, each, ...]``: rows in turn, or consecutive ones.

    Where ``shapes`` is given, any division will do, and on TPU each worker owns a part of every tensor.
    """

    def split(a: Array) -> Array:
        total = each * workers
        padded = jnp.pad(a, [(0, total - a.shape[0])] + [(0, 0)] * (a.ndim - 1)) if total != a.shape[0] else a
        if not in_turn:
            return padded.reshape(workers, each, *a.shape[1:])
        return jnp.swapaxes(padded.reshape(each, workers, *a.shape[1:]), 0, 1)

    if not array.size or workers > _MOST_WORKERS or not are_of(array, shapes):
        return split(array)
    parts = functools.partial(_parts_by_owner, workers=workers, shapes=shapes)
    return lax.platform_dependent(array, tpu=parts, default=split)


def _parts_by_owner(array: Array, workers: int, shapes: Shapes) -> Array:
    """Returns each worker's part of every tensor: ``[N, each, ...]``.

    A tensor's part is made from the tensor alone, and not from one long vector of all of them, which is several copies.
    The last rows of each owner are the entries that do not divide into equal parts.
    """
    tensors, rest = cut(array, shapes), [jnp.zeros((0,), array.dtype)]
    for i, tensor in enumerate(tensors):
        if left := tensor.size % workers:
            flat = tensor.reshape(-1)
            tensors[i] = flat[:-left]
            rest.append(flat[-left:])
    last = jnp.concatenate(rest)
    tensors.append(jnp.pad(last, (0, -last.size % workers)))
    parts = [t.reshape(workers, t.size // workers) for t in tensors if t.size]
    return jnp.concatenate(parts, axis=1).reshape(workers, -1, *array.shape[1:])


def by_row(owned: Array, in_turn: bool, shapes: Shapes) -> Array:
    """Inverts :func:`by_owner`, but for the padding."""
    workers, each, *one = owned.shape

    def join(a: Array) -> Array:
        return (jnp.swapaxes(a, 0, 1) if in_turn else a).reshape(-1, *a.shape[2:])

    entries = sum(math.prod(shape) for shape in shapes)
    if not owned.size or workers > _MOST_WORKERS or math.prod(one) != 1 or each != -(-entries // workers):
        return join(owned)
    return lax.platform_dependent(owned, tpu=functools.partial(_parts_by_row, shapes=shapes), default=join)


def _parts_by_row(owned: Array, shapes: Shapes) -> Array:
    """Inverts :func:`_parts_by_owner`."""
    workers, each, *one = owned.shape
    sizes, flat = [math.prod(shape) for shape in shapes], owned.reshape(workers, each)
    ends = list(itertools.accumulate((n // workers for n in sizes), initial=0))
    last, at, tensors = flat[:, ends[-1] :].reshape(-1), 0, []
    for n, start, end in zip(sizes, ends[:-1], ends[1:], strict=True):
        main, left = flat[:, start:end].reshape(-1), n % workers
        tensors.append(jnp.concatenate([main, last[at : at + left]]) if left else main)
        at += left
    return joined([*tensors, last[at:]], (workers * each, *one))


def wait(arrays: Sequence[Array], after: Sequence[Array]) -> list[Array]:
    """Returns the same arrays, complete only once others are there.

    This is for collectives that must not be combined: a combined one would wait for the inputs of the last of them. An
    optimization barrier does not keep XLA:TPU from combining, so the first entry of each array is made to depend on the
    others in a way that no compiler simplifies. The rest of an array is made without waiting.

    Args:
        arrays: of any shape, of a dtype of 1, 2 or 4 bytes.
        after: likewise.
    """
    there = are_there(after)
    return list(arrays) if there is None else [_first_if(there, a) if a.size else a for a in arrays]


def are_there(arrays: Sequence[Array]) -> Array | None:
    """Returns True, boolean scalar, which no compiler knows before the arrays are there; ``None`` without an entry."""
    known = [_is_there(a) for a in arrays if a.size]
    return jnp.stack(known).all() if known else None


def _is_there(a: Array) -> Array:
    """Returns true for every number: it has no more ones than bits."""
    first = lax.slice_in_dim(a.reshape(-1), 0, 1)[0]
    word = lax.bitcast_convert_type(first, jnp.dtype(f"uint{8 * a.dtype.itemsize}"))
    return lax.population_count(word) <= 8 * a.dtype.itemsize


def _first_if(there: Array, a: Array) -> Array:
    flat = a.reshape(-1)
    first = jnp.where(there, lax.slice_in_dim(flat, 0, 1), jnp.zeros((), a.dtype))
    return lax.dynamic_update_slice_in_dim(flat, first, 0, axis=0).reshape(a.shape)
