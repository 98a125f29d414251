"""An array as the tensors that it was joined from: XLA removes a join that is followed by the same cuts."""

import itertools
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array

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
    There a tensor's part is made from the tensor alone, and not from one long vector of all of them, which is several copies.
    The last rows of each owner are the entries that do not divide into equal parts.
    """

    def split(a: Array) -> Array:
        total = each * workers
        padded = jnp.pad(a, [(0, total - a.shape[0])] + [(0, 0)] * (a.ndim - 1)) if total != a.shape[0] else a
        if not in_turn:
            return padded.reshape(workers, each, *a.shape[1:])
        return jnp.swapaxes(padded.reshape(each, workers, *a.shape[1:]), 0, 1)

    def apart(array: Array) -> Array:
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

    if not array.size or workers > _MOST_WORKERS or not are_of(array, shapes):
        return split(array)
    return lax.platform_dependent(array, tpu=apart, default=split)


def by_row(owned: Array, in_turn: bool, shapes: Shapes) -> Array:
    """Inverts :func:`by_owner`, but for the padding."""
    workers, each, *one = owned.shape
    sizes = [math.prod(shape) for shape in shapes]

    def join(a: Array) -> Array:
        return (jnp.swapaxes(a, 0, 1) if in_turn else a).reshape(-1, *a.shape[2:])

    def together(owned: Array) -> Array:
        flat = owned.reshape(workers, each)
        ends = list(itertools.accumulate((n // workers for n in sizes), initial=0))
        last, at, tensors = flat[:, ends[-1] :].reshape(-1), 0, []
        for n, start, end in zip(sizes, ends[:-1], ends[1:], strict=True):
            main, left = flat[:, start:end].reshape(-1), n % workers
            tensors.append(jnp.concatenate([main, last[at : at + left]]) if left else main)
            at += left
        return joined([*tensors, last[at:]], (workers * each, *one))

    if not owned.size or workers > _MOST_WORKERS or math.prod(one) != 1 or each != -(-sum(sizes) // workers):
        return join(owned)
    return lax.platform_dependent(owned, tpu=together, default=join)
