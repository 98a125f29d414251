"""Changes the number of workers, with nothing lost."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp_jax import _arguments, _checks, kernels
from gradcomp_jax._checks import is_typed_key
from gradcomp_jax._typing import PyTree
from gradcomp_jax.core import ExchangeState
from gradcomp_jax.core.overwritten import is_overwritten
from gradcomp_jax.memory import Momentum
from gradcomp_jax.memory.narrow import Narrow, is_narrow, values_of
from gradcomp_jax.per_device import PerDevice, Return, is_lifted, is_per_device, nodes_of
from gradcomp_jax.training.refusals import refuse_donated, refuse_unmarked


@_arguments.checked
def resize_workers(state: PyTree, *, old: int, new: int) -> PyTree:
    """Gives per-device state of ``old`` workers to ``new`` workers.

    The mean over the workers of every residual and velocity does not change. If ``new`` is a multiple of ``old``, the workers'
    own rows are repeated. Otherwise every worker gets the mean, and the first one also gets what rounding the mean to float32
    left over, so that the error of the sum is one rounding of the first worker's rows. Owners' shards are cut anew. If there
    are no owners for so few workers, what owners held returns to every worker. PRNG keys have no mean: worker i gets the key of
    worker i mod ``old``. Everything else is passed through.

    For Flax's collection ``_overwrite_with_gradient`` of replicas, every worker gets the maximum instead of the mean.

    Memories that are narrower than float32 are widened, resized and rounded once to the nearest values of their dtype: the
    error of the sum is then one such rounding. Rows that are repeated, and owners' shards, keep their bits.

    Example:
        >>> state = gc.init_state(params, optax.chain(gc.topk_sgd(axis_name="data"), optax.sgd(0.1)), mesh)
        >>> smaller = gc.resize_workers(state, old=8, new=4)
        >>> smaller.params["kernel"].shape
        (256, 256)

    Args:
        state: a tree with the global values of its :class:`PerDevice` leaves, as ``init_state`` and checkpoints hold them, or
            with the workers' values stacked, as ``pmap`` and ``vmap`` hold them by :func:`state_axes`.
        old: the number of workers that the state belongs to; for a hierarchical exchange, of outer workers.
        new: the number of workers that it is to belong to.

    Returns:
        The tree with NumPy arrays in the changed leaves, in the same layout; place it with ``jax.device_put`` and
        ``state_shardings``.

    Raises:
        ValueError: if a leaf does not belong to ``old`` workers, an owners' shard comes without the memories that take it,
            what all workers share is stacked too, or if an exchange's state has lost its marks.
    """
    refuse_donated(state)
    refuse_unmarked(state)
    old, new = _checks.positive_int("old", old), _checks.positive_int("new", new)
    if old == new:
        return state
    # Flax NNX keeps the array inside a variable.
    resized = on_marks(state, lambda leaf: _with(leaf, array_of(leaf)))
    if new % old:
        resized = jax.tree_util.tree_map_with_path(_largest, resized, is_leaf=is_per_device)
    if stacked := _is_stacked(resized, old):
        resized = on_marks(resized, _joined)
    resized = _resized(resized, old, new)
    if stacked:
        resized = on_marks(resized, functools.partial(_stacked, workers=new))
    return jax.tree.map(
        lambda leaf, before: put(before, leaf.value, rows=leaf.rows) if is_per_device(leaf) else leaf,
        resized,
        state,
        is_leaf=is_per_device,
    )


def on_marks(tree: PyTree, change: Callable[[PerDevice], Any]) -> PyTree:
    """Returns a tree with its marks changed, and all else as it is."""
    return jax.tree.map(lambda leaf: change(leaf) if is_per_device(leaf) else leaf, tree, is_leaf=is_per_device)


def array_of(mark: PerDevice) -> Any:
    """Returns the array, which Flax NNX keeps within a variable."""
    return jax.tree.leaves(mark.value)[0]


def put(mark: PerDevice, value: Any, **changes: Any) -> PerDevice:
    """Returns a mark with another array, in a variable again if there is one."""
    return _with(mark, jax.tree.unflatten(jax.tree.structure(mark.value), [value]), **changes)


def _with(mark: PerDevice, value: Any, **changes: Any) -> PerDevice:
    return dataclasses.replace(mark, value=value, **changes)


def _largest(path: tuple, leaf: Any) -> Any:
    """Gives all replicas the maximum of what is overwritten, which has no mean."""
    if not is_lifted(leaf) or not is_overwritten(path):
        return leaf
    value = _host(leaf.value)
    return _with(leaf, np.broadcast_to(value.max(axis=0), value.shape))


def _resized(state: PyTree, old: int, new: int) -> PyTree:
    """Resizes state that lies joined along its rows."""

    def resize(leaf: Any, *, returned: bool = False) -> Any:
        if isinstance(leaf, ExchangeState):
            of_field = functools.partial(resize, returned=True)
            inside = jax.tree.map(of_field, leaf, is_leaf=lambda node: _is_resized(node) and node is not leaf)
            memories = [_returned(*pair, old, new) for pair in zip(inside.memory, leaf.server, strict=True)]
            return inside._replace(memory=tuple(memories))
        if is_narrow(leaf):
            if leaf.values.kind == "worker" and (new % old or leaf.values.entries):
                return narrowed(resize(wide(leaf)), leaf, new)
            return Narrow(*(resize(part, returned=returned) for part in leaf))
        if not is_per_device(leaf):
            return leaf
        if leaf.returns and new < leaf.returns.least <= old and not returned:
            raise ValueError(
                f"what the owners of {old} workers hold goes to the memories of {new}, which lie beside it: resize the whole"
                f" {ExchangeState.__name__}, or the optimizer state that it is in"
            )
        change = {"worker": _worker, "shard": _shard, "replica": _replica}[leaf.kind]
        if is_typed_key(leaf.value):
            return _with(leaf, _keys(leaf, old, new))
        value = np.asarray(leaf.value)
        if leaf.entries:
            return _owned(leaf, value, old, new)
        return _with(leaf, change(leaf, value, old, new))

    return jax.tree.map(resize, state, is_leaf=_is_resized)


def _is_resized(node: Any) -> bool:
    return isinstance(node, (PerDevice, Narrow, ExchangeState))


def _is_stacked(state: PyTree, workers: int) -> bool:
    """Returns whether values lie stacked, ``[workers, rows, ...]``, and not joined along their rows."""
    exchanges = nodes_of(state, lambda node: isinstance(node, ExchangeState))
    if any(np.ndim(exchange.step) for exchange in exchanges):
        raise ValueError(
            "all of this state is stacked, also what all workers share, such as the exchange's step: give jax.pmap in_axes and"
            " out_axes of gradcomp_jax.state_axes(state), or take that of one worker, x[0], of every leaf but PerDevice ones"
        )
    marked = nodes_of(state, is_per_device)
    if not all(lies_stacked(leaf, workers) for leaf in marked):
        return False
    # One row looks the same both ways except for its dimensions; the ratio of an exchange then decides.
    ratios = [e.memory_ratio for e in exchanges if is_per_device(e.memory_ratio)]
    return any(leaf.held(workers) != 1 for leaf in marked) or any(np.ndim(ratio.value) == 2 for ratio in ratios)


def lies_stacked(leaf: PerDevice, workers: int) -> bool:
    """Returns whether a value may be that of this number of workers, stacked: ``[workers, rows, ...]``."""
    return leaf.shards == 1 and leaf.value.shape[:2] == (workers, leaf.held(workers))


def _joined(leaf: PerDevice) -> PerDevice:
    value = _host(leaf.value)
    return _with(leaf, value.reshape(math.prod(value.shape[:2]), *value.shape[2:]))


def _stacked(leaf: PerDevice, *, workers: int) -> PerDevice:
    value = _host(leaf.value)
    return _with(leaf, value.reshape(workers, len(value) // workers, *value.shape[1:]))


def _returned(memories: tuple, server: Any, old: int, new: int) -> tuple:
    """Returns resized memories of a part, with what its owners held if there are no owners from now on."""
    mark = values_of(server)
    returns = mark.returns if is_per_device(mark) else None
    if returns is None or not new < returns.least <= old:
        return memories
    return given_back(memories, server, old, new)


def given_back(memories: tuple, server: Any, old: int, new: int) -> tuple:
    """Returns the memories of ``new`` workers, each with what the owners among ``old`` hold of its mean."""
    mark = values_of(server)
    returns, rows = cast(Return, mark.returns), _rows(mark, np.asarray(wide(server).value), old)
    result, start = [], 0
    for memory, count in zip(memories, returns.rows, strict=True):
        like = memory.accumulated if isinstance(memory, Momentum) else memory
        kept = wide(like)
        size = kept.rows * kept.value.shape[-1]
        owed = rows[:, start : start + count]
        flat = (owed.swapaxes(1, 2) if returns.dealt else owed).reshape(len(rows), -1)[:, :size]
        value = np.asarray(kept.value)
        exact = value.reshape(new, len(rows), size).astype(np.float64) + returns.sign * flat.astype(np.float64)
        kept = _with(kept, _rounded(exact, value.dtype).reshape(value.shape))
        kept = narrowed(kept, like, new)
        result.append(memory._replace(accumulated=kept) if isinstance(memory, Momentum) else kept)
        start += count
    return tuple(result)


def wide(node: Any) -> PerDevice:
    """Returns the float32 values of a node of scales and values; any other node is returned unchanged."""
    if not is_narrow(node):
        return node
    scale, values = (np.asarray(part.value) for part in node)
    wide = values.astype(np.float32) * np.repeat(scale, values.shape[1] // scale.shape[1], axis=1)
    return _with(node.values, wide)


def narrowed(leaf: PerDevice, like: Any, workers: int) -> Any:
    """Returns float32 rows in the form of a node; the first worker gets what rounding takes from all others."""
    if not is_narrow(like):
        return leaf
    dtype, each = like.values.value.dtype, np.asarray(leaf.value).reshape(workers, -1, leaf.value.shape[-1])
    parts = [_nearest(rows, dtype) for rows in each[1:]]
    lost = sum(
        (rows - wide.astype(np.float64) for rows, (_, _, wide) in zip(each[1:], parts, strict=True)), np.float64(0)
    )
    parts.insert(0, _nearest((each[0] + lost).astype(np.float32), dtype))
    scale, values = (np.concatenate([part[i] for part in parts]) for i in range(2))
    return Narrow(_with(like.scale, scale, rows=leaf.rows), _with(leaf, values))


def _nearest(rows: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns scales, the nearest values, and the numbers that they represent."""
    integer = jnp.issubdtype(dtype, jnp.integer)
    top = float((jnp.iinfo if integer else jnp.finfo)(dtype).max)
    stretches = rows.reshape(len(rows), -1, kernels.scale_width(rows.shape[1]))
    scale = np.abs(stretches).max(axis=2) * np.float32(1 / top)
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(0), scale)
    unit = np.repeat(scale, stretches.shape[2], axis=1)
    scaled = np.clip(np.where(unit > 0, rows / np.where(unit > 0, unit, 1), 0), -top, top)
    values = (np.rint(scaled) if integer else scaled).astype(dtype)
    return scale, values, values.astype(np.float32) * unit


def _host(value: Any) -> Any:
    """Returns a value in this process's memory; NumPy has no typed keys."""
    return jax.device_get(value) if is_typed_key(value) else np.asarray(value)


def _keys(leaf: PerDevice, old: int, new: int) -> Any:
    data = jax.random.key_data(cast(Any, _host(leaf.value)))
    own = _flat(_own_of_each(_each(leaf, np.asarray(data), old, leaf.rows), new))
    return jax.random.wrap_key_data(jnp.asarray(own), impl=jax.random.key_impl(cast(Any, leaf.value)))


def _own_of_each(each: np.ndarray, new: int) -> np.ndarray:
    """Returns the values of ``new`` workers, where worker i has that of worker i modulo the old number."""
    return each[np.arange(new) % len(each)]


def _each(leaf: PerDevice, value: np.ndarray, workers: int, rows: int) -> np.ndarray:
    """Returns ``[workers, shards, rows, ...]``, what each device of each worker has."""
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
    # An unsigned number is an old-style PRNG key, or bits: a mean of two would be neither.
    if new % old == 0 or jnp.issubdtype(value.dtype, jnp.unsignedinteger):
        return _flat(_own_of_each(each, new))
    mean = each.astype(np.float64).mean(axis=0)
    return _flat(_rounded(np.broadcast_to(mean, (new, *mean.shape)), value.dtype))


def _rounded(exact: np.ndarray, dtype: Any) -> np.ndarray:
    """Rounds what each worker has, ``[workers, ...]``; the first worker gets what rounding takes from all of them.

    Counters are not summed: each worker has the nearest whole number.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        return np.rint(exact).astype(dtype)
    result = exact.astype(dtype)
    result[0] += (exact - result).sum(axis=0).astype(dtype)
    return result


def _owned(leaf: PerDevice, value: np.ndarray, old: int, new: int) -> PerDevice:
    """Resizes rows that are cut by owner: joins them to whole tensors, resizes these, and cuts them for the new owners."""
    block, rows = value.shape[-1], leaf.held(new)
    each = _each(leaf, value, old, leaf.held(old)).reshape(old * leaf.shards, old, -1)
    tensors = each[..., : leaf.entries // old].reshape(-1, 1)
    whole = dataclasses.replace(leaf, rows=leaf.entries, entries=0)
    resized = _worker(whole, tensors, old, new).reshape(new * leaf.shards, new, -1)
    padded = np.zeros((new * leaf.shards, new, rows // new * block), value.dtype)
    padded[..., : resized.shape[-1]] = resized
    return _with(leaf, padded.reshape(-1, block), rows=rows)


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
    return each.reshape(math.prod(each.shape[:3]), *each.shape[3:])
