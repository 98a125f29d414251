"""A change of the number of workers, with nothing lost."""

import dataclasses
from typing import Any, cast

import jax
import numpy as np

from gradcomp_jax import _checks
from gradcomp_jax._typing import PyTree
from gradcomp_jax.per_device import PerDevice, is_per_device


def resize_workers(state: PyTree, *, old: int, new: int) -> PyTree:
    """Gives per-device state of ``old`` workers to ``new`` workers.

    The mean over the workers of every residual and velocity stays what it was: where ``new`` is a multiple of ``old``
    the workers' own rows are repeated, otherwise everyone gets the mean, and the first worker what rounding the mean to
    float32 left over, so that what is off in the sum is one rounding of the first worker's rows. Owners' shares are
    cut anew. Everything else is passed through.

    Args:
        state: a tree with the global values of its :class:`PerDevice` leaves, as ``init_state`` and checkpoints hold
            them.
        old: workers that the state belongs to; of a hierarchical exchange, outer ones.
        new: workers that it shall belong to.

    Returns:
        The tree with NumPy arrays in the changed leaves; place it with ``jax.device_put`` and ``state_shardings``.

    Raises:
        ValueError: if a leaf does not belong to ``old`` workers.
    """
    _checks.positive_int("old", old)
    _checks.positive_int("new", new)

    def resize(leaf: Any) -> Any:
        if not is_per_device(leaf) or old == new:
            return leaf
        change = {"worker": _worker, "share": _share, "replica": _replica}[leaf.kind]
        value = np.asarray(leaf.value)
        if leaf.entries:
            return _owned(leaf, value, old, new)
        return dataclasses.replace(leaf, value=cast(Any, change(leaf, value, old, new)))

    return jax.tree.map(resize, state, is_leaf=is_per_device)


def _each(leaf: PerDevice, value: np.ndarray, workers: int, rows: int) -> np.ndarray:
    """``[workers, shares, rows, ...]``: what each device of each worker has.

    Raises:
        ValueError: if there is another number of rows.
    """
    if value.shape[0] != workers * leaf.shares * rows:
        within = f" x {leaf.shares} devices" if leaf.shares > 1 else ""
        expected = f"{workers} workers{within} x {rows} rows"
        if leaf.kind == "share":
            expected = f"{leaf.rows} rows over {workers} workers{within}"
        raise ValueError(
            f"per-device state of kind {leaf.kind!r} has {value.shape[0]} rows, expected {expected}; pass the number of"
            " workers that the state was made for as old="
        )
    return value.reshape(workers, leaf.shares, rows, *value.shape[1:])


def _worker(leaf: PerDevice, value: np.ndarray, old: int, new: int) -> np.ndarray:
    each = _each(leaf, value, old, leaf.rows)
    if new % old == 0:
        return _flat(np.tile(each, (new // old,) + (1,) * (each.ndim - 1)))
    mean = each.astype(np.float64).mean(axis=0)
    rounded = mean.astype(value.dtype)
    result = np.tile(rounded[None], (new,) + (1,) * rounded.ndim)
    result[0] += ((mean - rounded) * new).astype(value.dtype)
    return _flat(result)


def _owned(leaf: PerDevice, value: np.ndarray, old: int, new: int) -> PerDevice:
    """Rows that are cut by owner: put together to whole tensors, resized as those, and cut for the new owners."""
    block, rows = value.shape[-1], leaf.held(new)
    shards = _each(leaf, value, old, leaf.held(old)).reshape(old * leaf.shares, old, -1)
    tensors = shards[..., : leaf.entries // old].reshape(-1, 1)
    whole = dataclasses.replace(leaf, rows=leaf.entries, entries=0)
    resized = _worker(whole, tensors, old, new).reshape(new * leaf.shares, new, -1)
    padded = np.zeros((new * leaf.shares, new, rows // new * block), value.dtype)
    padded[..., : resized.shape[-1]] = resized
    return dataclasses.replace(leaf, value=cast(Any, padded.reshape(-1, block)), rows=rows)


def _replica(leaf: PerDevice, value: np.ndarray, old: int, new: int) -> np.ndarray:
    first = _each(leaf, value, old, leaf.rows)[0]
    return _flat(np.tile(first[None], (new,) + (1,) * first.ndim))


def _share(leaf: PerDevice, value: np.ndarray, old: int, new: int) -> np.ndarray:
    before, after = -(-leaf.rows // old), -(-leaf.rows // new)
    # Of each device within the workers, all rows: owners take them in turn.
    owned = np.moveaxis(_each(leaf, value, old, before), 0, 2).reshape(leaf.shares, old * before, *value.shape[1:])
    result = np.zeros((leaf.shares, new * after, *value.shape[1:]), value.dtype)
    result[:, : leaf.rows] = owned[:, : leaf.rows]
    return _flat(np.moveaxis(result.reshape(leaf.shares, after, new, *value.shape[1:]), 2, 0))


def _flat(each: np.ndarray) -> np.ndarray:
    return each.reshape(-1, *each.shape[3:])
