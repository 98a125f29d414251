"""Moves the state of exchanges to other options of the same methods, such as another density or collective.

Memories have the order of the leaves, whatever the block. The rows of owners have the order in which they are dealt, and return
to the memories if the new state has other owners or none. So the mean of memories and owners does not change, nor do updates.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, cast

import jax
import numpy as np

from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import PyTree
from gradcomp_jax.core import ExchangeState
from gradcomp_jax.memory.narrow import Narrow, is_narrow, values_of
from gradcomp_jax.per_device import PerDevice, Return, is_per_device, nodes_of
from gradcomp_jax.training.resize import array_of, given_back, narrowed, put, resize_workers, wide
from gradcomp_jax.training.restored import typed

Saved = Mapping[str, Any]
"""Arrays, or shapes of them, by name."""

_FIELDS = ("memory", "compressor", "server", "memory_ratio")
_REMEDY = "build the state with what wrote it, or start this method's memories with gradcomp_jax.replace_method"


def owners_of(state: PyTree) -> dict[str, Any]:
    """Returns, for each array of owners, how its rows return to the memories; a checkpoint keeps this."""
    found = {}
    for prefix, exchange in exchanges_of(state):
        for number, server in enumerate(exchange.server):
            mark = values_of(server)
            if is_per_device(mark) and mark.returns:
                found[f"{prefix}server/{number}"] = _said(mark)
    return found


def lies_otherwise(saved: Saved, like: PyTree) -> bool:
    """Returns whether a checkpoint has all that ``like`` has, except that memories or owners' rows have another layout."""
    ours = [prefix + field for prefix, _ in exchanges_of(like) for field in _FIELDS]

    def others(names: Any) -> set[str]:
        return {name for name in names if not any(name == o or name.startswith(f"{o}/") for o in ours)}

    named = names_of(like)
    if others(saved) != others(named):
        return False
    params = {name: leaf for name, leaf in named.items() if name.startswith("params/")}
    if any(saved[name].shape != np.shape(leaf) for name, leaf in params.items()):
        return False
    workers = _workers(saved, like)
    for prefix, exchange in exchanges_of(like):
        marks = [(f"{prefix}{name}", mark) for name, mark in marks_of(exchange)]
        names = {name for name in named if name.startswith((f"{prefix}memory/", f"{prefix}server/"))}
        if names != {name for name in saved if name.startswith((f"{prefix}memory/", f"{prefix}server/"))}:
            return True
        if any(workers is not None and not fits(saved[name].shape, mark, workers) for name, mark in marks):
            return True
    return False


def carried(saved: Saved, owners: Mapping[str, Any] | None, like: PyTree) -> PyTree:
    """Returns whole arrays of a checkpoint, with its :func:`owners_of`, in the structure of ``like``, on the host."""
    old, new = _workers(saved, like), _workers(names_of(like), like)
    if old is None or new is None:
        raise ValueError(
            "the checkpoint has memories where this state has none, or none where it has some: pass the same mask, or"
            f" {_REMEDY}"
        )
    prefixes = iter([prefix for prefix, _ in exchanges_of(like)])
    names = iter(names_of(like))

    def read(node: Any) -> Any:
        if isinstance(node, ExchangeState):
            for _ in jax.tree.leaves(node):
                next(names)
            return _read(next(prefixes), saved, owners, node, old)
        return typed(saved[next(names)], node)

    state = jax.tree.map(read, like, is_leaf=_is_exchange)
    state = resize_workers(state, old=old, new=new)
    return jax.tree.map(lambda node, wanted: _laid(node, wanted, new), state, like, is_leaf=_is_exchange)


def _is_exchange(node: object) -> bool:
    return isinstance(node, ExchangeState)


def exchanges_of(state: PyTree) -> Iterator[tuple[str, ExchangeState]]:
    """Yields all exchanges, each with the prefix of the names of its arrays."""
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_exchange):
        if _is_exchange(node):
            yield f"{path_name(path)}/" if path else "", node


def names_of(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree by their names."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def marks_of(exchange: ExchangeState) -> Iterator[tuple[str, PerDevice]]:
    """Yields memories and owners' rows, with the names of their arrays."""
    for field in ("memory", "server"):
        for path, mark in jax.tree_util.tree_leaves_with_path(getattr(exchange, field), is_leaf=is_per_device):
            if is_per_device(mark):
                ((inside, _),) = jax.tree_util.tree_leaves_with_path(mark)
                yield f"{field}/{path_name((*path, *inside))}", mark


def _workers(saved: Saved, like: PyTree) -> int | None:
    """Returns the number of workers of a checkpoint, by its one number for each; ``None`` if it has no memories."""
    for prefix, exchange in exchanges_of(like):
        mark = exchange.memory_ratio
        found = [value for name, value in saved.items() if name.startswith(f"{prefix}memory_ratio/")]
        if found and is_per_device(mark):
            return found[0].shape[0] // mark.shards
    return None


def fits(shape: tuple[int, ...], mark: PerDevice, workers: int) -> bool:
    """Returns whether an array may hold a memory or owners' rows of this number of workers, joined or stacked."""
    joined = (workers * mark.shards * mark.held(workers), *array_of(mark).shape[1:])
    return tuple(shape) == joined or tuple(shape[:2]) == (workers, mark.held(workers))


def _read(
    prefix: str, saved: Saved, owners: Mapping[str, Any] | None, like: ExchangeState, workers: int
) -> ExchangeState:
    """Returns a saved exchange's state, in which owners with another layout have returned what they hold."""
    memory = _memories(prefix, saved, like, workers)
    server = []
    for number, of_group in enumerate(list(memory)):
        start = f"{prefix}server/{number}"
        found = {name: value for name, value in saved.items() if name.startswith(f"{start}/")}
        said = None if owners is None else owners.get(start)
        if not found:
            server.append(())
            continue
        kept = _same_owners(f"{prefix}server", number, saved, like, said, workers)
        server.append(() if kept is None else kept)
        if kept is None:
            memory[number] = _with_owners(of_group, found, said, workers)
    counts = {field: np.asarray(saved[f"{prefix}{field}"]) for field in ("step", "skipped")}
    ratio = jax.tree.map(np.asarray, like.memory_ratio)
    if is_per_device(like.memory_ratio):
        (value,) = (value for name, value in saved.items() if name.startswith(f"{prefix}memory_ratio/"))
        ratio = put(like.memory_ratio, np.asarray(value))
    return like._replace(
        **counts,
        memory=tuple(map(tuple, memory)),
        compressor=_compressors(prefix, saved, like),
        server=tuple(server),
        memory_ratio=ratio,
    )


def _memories(prefix: str, saved: Saved, like: ExchangeState, workers: int) -> list[Any]:
    """Returns the memories as they were saved, in whatever rows."""
    marks = {name: mark for name, mark in marks_of(like) if name.startswith("memory/")}
    found = {name.removeprefix(prefix) for name in saved if name.startswith(f"{prefix}memory/")}
    if found != set(marks):
        raise ValueError(
            f"the checkpoint has other memories than this state ({sorted(found ^ set(marks))[0]!r} is in one of them). Which"
            f" tensors are compressed follows from the density where no mask= says it, and which of the others have a memory"
            f" from the dtype: pass the same mask and dtype, or {_REMEDY}"
        )

    def read(name: str, mark: PerDevice) -> PerDevice:
        value = np.asarray(saved[prefix + name])
        return put(mark, value, rows=value.shape[0] // (workers * mark.shards))

    values = iter([read(*pair) for pair in marks.items()])
    return list(jax.tree.map(lambda mark: next(values), like.memory, is_leaf=is_per_device))


def _compressors(prefix: str, saved: Saved, like: ExchangeState) -> Any:
    """Returns the state that compressors keep; the initial one if the saved one has another shape."""
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(like.compressor)]
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(like.compressor)]
    for number, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
        found = saved.get(f"{prefix}compressor/{name}")
        if found is not None and np.shape(found) == leaf.shape:
            leaves[number] = np.asarray(found)
    return jax.tree.unflatten(jax.tree.structure(like.compressor), leaves)


def _same_owners(start: str, number: int, saved: Saved, like: ExchangeState, said: Any, workers: int) -> Any:
    """Returns what owners hold if the same owners have the same rows, and ``None`` otherwise."""
    wanted = like.server[number]
    mark = values_of(wanted)
    if not is_per_device(mark) or said != _said(mark):
        return None
    marks = [
        (f"{start}/{name.removeprefix('server/')}", m)
        for name, m in marks_of(like)
        if name.startswith(f"server/{number}/")
    ]
    if any(name not in saved or not fits(saved[name].shape, m, workers) for name, m in marks):
        return None
    values = iter([put(m, np.asarray(saved[name])) for name, m in marks])
    return jax.tree.map(lambda m: next(values), wanted, is_leaf=is_per_device)


def _said(mark: PerDevice) -> dict[str, Any] | None:
    """Returns how owners' rows return to the memories, as JSON data."""
    return None if mark.returns is None else {**dataclasses.asdict(mark.returns), "rows": list(mark.returns.rows)}


def _with_owners(memories: tuple, found: Saved, said: Any, workers: int) -> tuple:
    """Returns the memories of a group, with what its owners held."""
    problem = "owners hold a part of what was not sent, and with these options there are other owners or none"
    marks = nodes_of(memories, is_per_device)
    if said is None:
        raise ValueError(
            f"{problem}. The checkpoint is of an earlier version, which does not say whose it is: restore it with the options"
            " that it was saved with, save it once more, and change them then"
        )
    if len(marks) < len(said["rows"]):
        raise ValueError(f"{problem}, nor a memory to give it back to: {_REMEDY}")
    if workers < said["least"]:
        return memories
    returns = Return(said["least"], tuple(said["rows"]), said["dealt"], said["sign"])
    parts = {
        name.split("/")[-2]: PerDevice(
            cast(Any, np.asarray(value)), sum(returns.rows), "shard", marks[0].shards, returns=returns
        )
        for name, value in found.items()
    }
    server = Narrow(parts["scale"], parts["values"]) if "scale" in parts else next(iter(parts.values()))
    return given_back(memories, server, workers, workers)


def _laid(node: Any, wanted: Any, workers: int) -> Any:
    """Returns a state whose memories lie in the rows of ``wanted``, and whose new owners start from zeros."""
    if not _is_exchange(node):
        return node
    server = [
        jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), want) if not jax.tree.leaves(have) else have
        for have, want in zip(node.server, wanted.server, strict=True)
    ]
    memory = jax.tree.map(
        lambda have, want: _reblocked(have, want, workers),
        node.memory,
        wanted.memory,
        is_leaf=lambda kept: is_per_device(kept) or is_narrow(kept),
    )
    return wanted._replace(
        step=node.step,
        skipped=node.skipped,
        memory=memory,
        compressor=node.compressor,
        server=tuple(server),
        memory_ratio=node.memory_ratio,
    )


def _reblocked(have: Any, want: Any, workers: int) -> Any:
    """Returns the same entries in rows of another block; the last row is padded with zeros."""
    mark = values_of(want)
    before, shape = array_of(values_of(have)), array_of(mark).shape
    if before.shape == shape:
        return jax.tree.map(lambda m, old: put(m, array_of(old)), want, have, is_leaf=is_per_device)
    (rows, block), (old_rows, old_block) = ((of[0] // (workers * mark.shards), of[1]) for of in (shape, before.shape))
    # The tensor in both has more entries than all rows except one could hold.
    least, most = max((rows - 1) * block, (old_rows - 1) * old_block), min(rows * block, old_rows * old_block)
    if mark.entries or least >= most:
        raise ValueError(
            f"a memory of the checkpoint has {old_rows} rows of {old_block}, and this state's {rows} of {block}: it is of"
            f" another model, or the options divide its tensors otherwise; {_REMEDY}"
        )
    flat = array_of(wide(have)).reshape(workers * mark.shards, -1)
    laid = np.zeros((len(flat), rows * block), flat.dtype)
    laid[:, :most] = flat[:, :most]
    return narrowed(put(mark, laid.reshape(shape)), want, workers)
