"""Checkpoints through Orbax: bit for bit, residuals included, onto any number of workers."""

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gradcomp_jax._typing import PyTree
from gradcomp_jax.per_device import is_per_device, nodes_of
from gradcomp_jax.training.resize import resize_workers
from gradcomp_jax.transforms.policies import path_name

_DIGESTS = "sha256.json"
"""Of a checkpoint's files: a bit that flips on a disk is found before it is trained on."""


class DamagedCheckpointError(ValueError):
    """A checkpoint whose files cannot be read, or not all of them."""


def save_checkpoint(directory: str | os.PathLike[str], state: PyTree, *, overwrite: bool = False) -> None:
    """Writes a state (any tree of arrays) to a new directory, and waits until it is on disk.

    The directory appears under its name when everything is in it: a process that is killed while it saves leaves earlier
    checkpoints as they are. With several processes of ``jax.distributed`` all of them call this with one directory that
    all of them see; each writes what its devices hold. The first process then reads the files once and writes their
    SHA-256 digests beside them, for :func:`restore_checkpoint` to compare.

    Args:
        directory: must not exist yet unless ``overwrite``.
        state: global arrays, such as a :class:`TrainState` from ``init_state`` or a train step.
        overwrite: replaces an earlier checkpoint of the same name.
    """
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path := os.path.abspath(directory), state, force=overwrite)
    _write_digests(pathlib.Path(path))


def restore_checkpoint(directory: str | os.PathLike[str], like: PyTree) -> PyTree:
    """Reads a state into the structure, dtypes and shardings of ``like``.

    A checkpoint of another number of workers is resized as :func:`resize_workers` says. How many processes wrote it does
    not matter. With several processes all of them call this, and all of them see the directory.

    Args:
        directory: what :func:`save_checkpoint` wrote.
        like: a state of the same model and optimizer on the present mesh, usually from ``init_state``; its values are not used.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: if the checkpoint belongs to another model or optimizer.
        DamagedCheckpointError: (a ``ValueError``) if files of the checkpoint are missing or damaged.
    """
    import orbax.checkpoint as ocp

    path = os.path.abspath(directory)
    if not os.path.isdir(path):
        raise FileNotFoundError(f"there is no checkpoint at {path}; save one with gradcomp_jax.save_checkpoint")
    if damaged := _damaged_files(pathlib.Path(path)):
        raise _damaged(path, f"{damaged} of its files differ from what was saved")
    with ocp.StandardCheckpointer() as checkpointer:
        with _damage(path):
            metadata = _metadata(checkpointer, path)
        saved = _saved_shapes(metadata, path, like)
        old, new = _workers(saved), _workers(like)
        if old is None or new is None or old == new:
            _same_shapes(saved, like)
            with _damage(path):
                return checkpointer.restore(path, jax.tree.map(ocp.utils.to_shape_dtype_struct, like))
        # Onto the host first, in every process: the saved shapes do not fit the present mesh.
        with _damage(path):
            host = checkpointer.restore(path, jax.tree.map(lambda x: np.empty(x.shape, x.dtype), saved))
    resized = resize_workers(host, old=old, new=new)
    _same_shapes(resized, like)
    return jax.tree.map(_placed, resized, like)


@contextlib.contextmanager
def _damage(path: str) -> Iterator[None]:
    """Says of anything that goes wrong while files are read which checkpoint it was, and what to do."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise _damaged(path, f"{type(error).__name__}: {reason}") from error


def _damaged(path: str, reason: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"the checkpoint at {path} is damaged ({reason}): go back to an earlier checkpoint, or start anew in another folder"
    )


def _placed(value: np.ndarray, target: jax.Array) -> jax.Array:
    """Every process gives its devices their parts of a value that all processes have."""
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, target.sharding, lambda index: value[index])


def _saved_shapes(metadata: PyTree, path: str, like: PyTree) -> PyTree:
    """What the checkpoint holds, in the structure of ``like``."""
    found = {path_name(p): leaf for p, leaf in jax.tree_util.tree_leaves_with_path(metadata)}
    wanted = [path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(like)]
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
    tree = getattr(tree, "tree", tree)
    if tree is None:
        raise ValueError("the list of its arrays cannot be read")
    return tree


def _workers(state: PyTree) -> int | None:
    """The number of workers that all per-device leaves fit; ``None`` without such leaves, or if there is none.

    Owners' shards alone could fit several numbers; an exchange's state has a number for each worker beside them.
    """
    marked = [leaf for leaf in nodes_of(state, is_per_device) if leaf.rows]
    sizes = [leaf.value.shape[0] for leaf in marked]

    def fits(workers: int) -> bool:
        each = (leaf.held(workers) for leaf in marked)
        many = (workers * leaf.shards * rows for leaf, rows in zip(marked, each, strict=True))
        return all(size == rows for size, rows in zip(sizes, many, strict=True))

    return next((n for n in range(1, max(sizes, default=0) + 1) if fits(n)), None)


def _same_shapes(found: PyTree, like: PyTree) -> None:
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(like), strict=True)
    for (path, a), b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(
                f"the checkpoint's {path_name(path)} is {a.dtype}{list(a.shape)}, the state's {b.dtype}{list(b.shape)}:"
                " it is of another model, block or number of workers"
            )


def _write_digests(folder: pathlib.Path) -> None:
    """Writes the digest of every file in a folder into one more file, in one go.

    With several processes the first one does it, and reads what the others have written.
    """
    if jax.process_index() != 0:
        return
    draft = folder / f"{_DIGESTS}.draft"
    draft.write_text(json.dumps(_digests(folder)))
    os.replace(draft, folder / _DIGESTS)


def _damaged_files(folder: pathlib.Path) -> int:
    """How many files of a folder are missing or differ from their digests; 0 where no digests were written.

    With several processes the first one looks and tells the others, so that all of them go on or none does.
    """
    found = _count_damaged(folder) if jax.process_index() == 0 else 0
    if jax.process_count() > 1:
        found = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
    return found


def _count_damaged(folder: pathlib.Path) -> int:
    try:
        written = json.loads((folder / _DIGESTS).read_bytes())
        present = _digests(folder)
        return sum(present.get(name) != digest for name, digest in written.items())
    except FileNotFoundError:
        return 0
    except (ValueError, AttributeError, OSError):
        return 1


def _digests(folder: pathlib.Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(_DIGESTS):
            with path.open("rb") as file:
                found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
