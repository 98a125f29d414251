"""Checkpoints through Orbax: bit for bit, residuals included, onto any number of workers."""

import os
from typing import Any

import jax
import numpy as np

from gradcomp_jax._typing import PyTree
from gradcomp_jax.per_device import is_per_device
from gradcomp_jax.training.resize import resize_workers


def save_checkpoint(directory: str | os.PathLike[str], state: PyTree, *, overwrite: bool = False) -> None:
    """Writes a state (any tree of arrays) to a new directory, and waits until it is on disk.

    Args:
        directory: must not exist yet unless ``overwrite``.
        state: global arrays, such as a :class:`TrainState` from ``init_state`` or a train step.
        overwrite: replaces an earlier checkpoint of the same name.
    """
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(os.path.abspath(directory), state, force=overwrite)


def restore_checkpoint(directory: str | os.PathLike[str], like: PyTree) -> PyTree:
    """Reads a state into the structure, dtypes and shardings of ``like``.

    A checkpoint of another number of workers is resized as :func:`resize_workers` says.

    Args:
        directory: what :func:`save_checkpoint` wrote.
        like: a state of the same model and optimizer on the present mesh, usually from ``init_state``; its values are
            not
            used.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: if the checkpoint belongs to another model or optimizer.
    """
    import orbax.checkpoint as ocp

    path = os.path.abspath(directory)
    if not os.path.isdir(path):
        raise FileNotFoundError(f"there is no checkpoint at {path}; save one with gradcomp_jax.save_checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        saved = _saved_shapes(checkpointer, path, like)
        old, new = _workers(saved), _workers(like)
        if old is None or new is None or old == new:
            _same_shapes(saved, like)
            return checkpointer.restore(path, jax.tree.map(ocp.utils.to_shape_dtype_struct, like))
        # Onto the host first: the saved shapes do not fit the present mesh.
        host = checkpointer.restore(path, jax.tree.map(lambda x: np.empty(x.shape, x.dtype), saved))
    resized = resize_workers(host, old=old, new=new)
    _same_shapes(resized, like)
    return jax.tree.map(lambda value, target: jax.device_put(value, target.sharding), resized, like)


def _saved_shapes(checkpointer: Any, path: str, like: PyTree) -> PyTree:
    """What the checkpoint holds, in the structure of ``like``."""
    found = {_plain(p): leaf for p, leaf in jax.tree_util.tree_leaves_with_path(_metadata(checkpointer, path))}
    wanted = [_plain(p) for p, _ in jax.tree_util.tree_leaves_with_path(like)]
    missing, surplus = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or surplus:
        raise ValueError(
            f"the checkpoint at {path} is of another model or optimizer: it lacks {missing[:3]} and has "
            f"{surplus[:3]} besides"
            f" ({len(missing)} and {len(surplus)} leaves in all); build the state with the chain that wrote the "
            "checkpoint"
        )
    shapes = [jax.ShapeDtypeStruct(found[name].shape, found[name].dtype) for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(like), shapes)


def _metadata(checkpointer: Any, path: str) -> PyTree:
    metadata = checkpointer.metadata(path)
    tree = getattr(metadata, "item_metadata", metadata)
    return getattr(tree, "tree", tree)


def _plain(path: tuple) -> str:
    """A path without the node types, which a checkpoint does not keep."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def _workers(state: PyTree) -> int | None:
    """The number of workers that all per-device leaves fit; ``None`` without such leaves, or if there is none.

    Owners' shares alone may fit several numbers: any of them will do, because it is the rows that are cut anew.
    """
    marked = [leaf for leaf in jax.tree.leaves(state, is_leaf=is_per_device) if is_per_device(leaf) and leaf.rows]
    sizes = [leaf.value.shape[0] for leaf in marked]

    def fits(workers: int) -> bool:
        each = (-(-leaf.rows // workers) if leaf.kind == "share" else leaf.rows for leaf in marked)
        many = (workers * leaf.shares * rows for leaf, rows in zip(marked, each, strict=True))
        return all(size == rows for size, rows in zip(sizes, many, strict=True))

    return next((n for n in range(1, max(sizes, default=0) + 1) if fits(n)), None)


def _same_shapes(found: PyTree, like: PyTree) -> None:
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(like), strict=True)
    for (path, a), b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(
                f"the checkpoint's {_plain(path)} is {a.dtype}{list(a.shape)}, the state's {b.dtype}{list(b.shape)}:"
                " it is of another model, block or number of workers"
            )
