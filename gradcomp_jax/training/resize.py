"""A change of the number of workers, with nothing lost."""

import dataclasses
from typing import Any

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
        old: workers that the state belongs to.
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
        change = _share if leaf.kind == "share" else _worker
        return dataclasses.replace(leaf, value=change(leaf, np.asarray(leaf.value), old, new))

    return jax.tree.map(resize, state, is_leaf=is_per_device)


def _worker(leaf: PerDevice, value: np.ndarray, old: int, new: int) -> np.ndarray:
    if value.shape[0] != old * leaf.rows:
        raise ValueError(
            f"per-device state has {value.shape[0]} rows, expected {old} workers x {leaf.rows} rows; pass the "
            "number of workers"
            " that the state was made for as old="
        )
    each = value.reshape(old, leaf.rows, *value.shape[1:])
    if new % old == 0:
        return np.tile(each, (new // old,) + (1,) * (each.ndim - 1)).reshape(new * leaf.rows, *value.shape[1:])
    mean = each.astype(np.float64).mean(axis=0)
    rounded = mean.astype(value.dtype)
    result = np.tile(rounded[None], (new,) + (1,) * rounded.ndim)
    result[0] += ((mean - rounded) * new).astype(value.dtype)
    return result.reshape(new * leaf.rows, *value.shape[1:])


def _share(leaf: PerDevice, value: np.ndarray, old: int, new: int) -> np.ndarray:
    if value.shape[0] != old * -(-leaf.rows // old):
        raise ValueError(
            f"owners' state has {value.shape[0]} rows, expected {leaf.rows} rows over {old} workers; pass the "
            "number of workers"
            " that the state was made for as old="
        )
    result = np.zeros((new * -(-leaf.rows // new), *value.shape[1:]), value.dtype)
    result[: leaf.rows] = value[: leaf.rows]
    return result
