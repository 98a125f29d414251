"""A change of the number of workers, with nothing lost."""

import dataclasses
import functools
from typing import Any, cast

import jax
import numpy as np

from gradcomp_jax import _checks
from gradcomp_jax._typing import PyTree
from gradcomp_jax.memory import Momentum
from gradcomp_jax.per_device import PerDevice, is_per_device
from gradcomp_jax.transforms import ExchangeState


def resize_workers(state: PyTree, *, old: int, new: int) -> PyTree:
    """Gives per-device state of ``old`` workers to ``new`` workers.

    The mean over the workers of every residual and velocity stays what it was: where ``new`` is a multiple of ``old`` the
    workers' own rows are repeated, otherwise everyone gets the mean, and the first worker what rounding the mean to float32
    left over, so that what is off in the sum is one rounding of the first worker's rows. Owners' shards are cut anew; where so
    few workers are left that there are no owners, what those held goes back to every worker. Everything else is passed through.

    Args:
        state: a tree with the global values of its :class:`PerDevice` leaves, as ``init_state`` and checkpoints hold them.
        old: workers that the state belongs to; of a hierarchical exchange, outer ones.
        new: workers that it shall belong to.

    Returns:
        The tree with NumPy arrays in the changed leaves; place it with ``jax.device_put`` and ``state_shardings``.

    Raises:
        ValueError: if a leaf does not belong to ``old`` workers, or an owners' shard comes without the memories that take it.
    """
    _checks.positive_int("old", old)
    _checks.positive_int("new", new)

    def resize(leaf: Any, *, returned: bool = False) -> Any:
        if isinstance(leaf, ExchangeState):
            of_field = functools.partial(resize, returned=True)
            inside = ExchangeState(*(jax.tree.map(of_field, field, is_leaf=is_per_device) for field in leaf))
            memories = [_returned(*pair, old, new) for pair in zip(inside.memory, leaf.server, strict=True)]
            return inside._replace(memory=tuple(memories))
        if not is_per_device(leaf) or old == new:
            return leaf
        if leaf.returns and new < leaf.returns.least <= old and not returned:
            raise ValueError(
                f"what the owners of {old} workers hold goes to the memories of {new}, which lie beside it: resize the whole"
                f" {ExchangeState.__name__}, or the optimizer state that it is in"
            )
        change = {"worker": _worker, "shard": _shard, "replica": _replica}[leaf.kind]
        value = np.asarray(leaf.value)
        if leaf.entries:
            return _owned(leaf, value, old, new)
        return dataclasses.replace(leaf, value=cast(Any, change(leaf, value, old, new)))

    return jax.tree.map(resize, state, is_leaf=lambda node: is_per_device(node) or isinstance(node, ExchangeState))


def _returned(memories: tuple, server: Any, old: int, new: int) -> tuple:
    """Resized memories of a part, with what owners held before, where there are none from now on."""
    returns = server.returns if is_per_device(server) else None
    if returns is None or not new < returns.least <= old:
        return memories
    rows = _rows(server, np.asarray(server.value), old)
    result, start = [], 0
    for memory, count in zip(memories, returns.rows, strict=True):
        kept = memory.accumulated if isinstance(memory, Momentum) else memory
        size = kept.rows * kept.value.shape[-1]
        owed = rows[:, start : start + count]
        flat = (owed.swapaxes(1, 2) if returns.dealt else owed).reshape(len(rows), -1)[:, :size]
        value = np.asarray(kept.value)
        exact = value.reshape(new, len(rows), size).astype(np.float64) + returns.sign * flat.astype(np.float64)
        kept = dataclasses.replace(kept, value=cast(Any, _rounded(exact, value.dtype).reshape(value.shape)))
        result.append(memory._replace(accumulated=kept) if isinstance(memory, Momentum) else kept)
        start += count
    return tuple(result)


def _each(leaf: PerDevice, value: np.ndarray, workers: int, rows: int) -> np.ndarray:
    """``[workers, shards, rows, ...]``: what each device of each worker has.

    Raises:
        ValueError: if there is another number of rows.
    """
    if value.shape[0] != workers * leaf.shards * rows:
        within = f" x {leaf.shards} devices" if leaf.shards > 1 else ""
        expected = f"{workers} workers{within} x {rows} rows"
        if leaf.kind == "shard":
            expected = f"{leaf.rows} rows over {workers} workers{within}"
        raise ValueError(
            f"per-device state of kind {leaf.kind!r} has {value.shape[0]} rows, expected {expected}; pass the number of"
            " workers that the state was made for as old="
        )
    return value.reshape(workers, leaf.shards, rows, *value.shape[1:])


def _worker(leaf: PerDevice, value: np.ndarray, old: int, new: int) -> np.ndarray:
    each = _each(leaf, value, old, leaf.rows)
    if new % old == 0:
        return _flat(np.tile(each, (new // old,) + (1,) * (each.ndim - 1)))
    mean = each.astype(np.float64).mean(axis=0)
    return _flat(_rounded(np.broadcast_to(mean, (new, *mean.shape)), value.dtype))


def _rounded(exact: np.ndarray, dtype: Any) -> np.ndarray:
    """Rounds what each worker has, ``[workers, ...]``; the first one gets what rounding takes from all of them."""
    result = exact.astype(dtype)
    result[0] += (exact - result).sum(axis=0).astype(dtype)
    return result


def _owned(leaf: PerDevice, value: np.ndarray, old: int, new: int) -> PerDevice:
    """Rows that are cut by owner: put together to whole tensors, resized as those, and cut for the new owners."""
    block, rows = value.shape[-1], leaf.held(new)
    each = _each(leaf, value, old, leaf.held(old)).reshape(old * leaf.shards, old, -1)
    tensors = each[..., : leaf.entries // old].reshape(-1, 1)
    whole = dataclasses.replace(leaf, rows=leaf.entries, entries=0)
    resized = _worker(whole, tensors, old, new).reshape(new * leaf.shards, new, -1)
    padded = np.zeros((new * leaf.shards, new, rows // new * block), value.dtype)
    padded[..., : resized.shape[-1]] = resized
    return dataclasses.replace(leaf, value=cast(Any, padded.reshape(-1, block)), rows=rows)


def _replica(leaf: PerDevice, value: np.ndarray, old: int, new: int) -> np.ndarray:
    first = _each(leaf, value, old, leaf.rows)[0]
    return _flat(np.tile(first[None], (new,) + (1,) * first.ndim))


def _shard(leaf: PerDevice, value: np.ndarray, old: int, new: int) -> np.ndarray:
    after = leaf.held(new)
    result = np.zeros((leaf.shards, new * after, *value.shape[1:]), value.dtype)
    if not leaf.returns or min(old, new) >= leaf.returns.least:
        result[:, : leaf.rows] = _rows(leaf, value, old)
    return _flat(np.moveaxis(result.reshape(leaf.shards, after, new, *value.shape[1:]), 2, 0))


def _rows(leaf: PerDevice, value: np.ndarray, workers: int) -> np.ndarray:
    """Returns all rows of each device within the workers, ``[shards, rows, ...]``: owners take them in turn."""
    each = np.moveaxis(_each(leaf, value, workers, leaf.held(workers)), 0, 2)
    return each.reshape(leaf.shards, -1, *value.shape[1:])[:, : leaf.rows]


def _flat(each: np.ndarray) -> np.ndarray:
    return each.reshape(-1, *each.shape[3:])
