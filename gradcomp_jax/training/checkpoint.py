"""Checkpoints through Orbax: bit for bit, residuals included, onto any number of workers."""

import itertools
import os
import pathlib
from typing import Any, cast

import jax
import numpy as np
from jax.tree_util import tree_leaves_with_path

from gradcomp_jax import _arguments, _everyone, _files
from gradcomp_jax._checks import is_typed_key
from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import PyTree
from gradcomp_jax.per_device import is_per_device, nodes_of
from gradcomp_jax.training import checkpoint_files
from gradcomp_jax.training.carried import carried, lies_otherwise, names_of
from gradcomp_jax.training.checkpoint_reading import DamagedCheckpointError as DamagedCheckpointError
from gradcomp_jax.training.checkpoint_reading import damage, described, refuse_unreadable, without_echoes
from gradcomp_jax.training.checkpoint_record import (
    checkpoint_metadata,
    compare_makers,
    crc_of,
    data_of,
    refuse_damaged,
    refuse_meeting,
)
from gradcomp_jax.training.refusals import refuse_donated
from gradcomp_jax.training.resize import lies_stacked, resize_workers
from gradcomp_jax.training.restored import as_they_were, has_plain_numbers, placed, targets, typed
from gradcomp_jax.training.unreplicated import refuse_other_stacking

_TRIES = 20
"""How often a checkpoint is read again if it is replaced meanwhile."""


@_arguments.checked
def save_checkpoint(directory: str | os.PathLike[str], state: PyTree, *, overwrite: bool = False) -> None:
    """Writes a state (any tree of arrays) to a new directory, and waits until it is on disk.

    The directory gets its name when it is complete. A process that is killed while it saves leaves earlier checkpoints
    unchanged; with ``overwrite`` it leaves either the earlier one or the new one. Writers of one directory wait for each other,
    and a checkpoint that cannot be read back replaces nothing. With several processes of ``jax.distributed`` all of them call
    this with one directory that all of them see; each writes what its devices hold. The checkpoint says which methods made the
    state, and has a digest of every shard, for :func:`restore_checkpoint` to compare
    (:func:`gradcomp_jax.checkpoint_metadata`). To save in the background, or to keep the last few, see :doc:`checkpoints`.

    Example:
        >>> state = gc.init_state(params, optax.chain(gc.topk_sgd(axis_name="data"), optax.sgd(0.1)), mesh)
        >>> gc.save_checkpoint(folder / "step-0", state)
        >>> gc.restore_checkpoint(folder / "step-0", like=state).params["kernel"].shape
        (256, 256)

    Args:
        directory: a folder of a file system; it must not exist yet unless ``overwrite``.
        state: global arrays, such as a :class:`TrainState` from ``init_state`` or a train step.
        overwrite: replaces an earlier checkpoint of the same name. The new one is written beside it first, with
            ``.gradcomp-new`` after its name. Nothing is deleted that no save has written.

    Raises:
        ValueError: if the directory exists and ``overwrite`` is not set, or it is not a checkpoint, holds other files, or is a
            URL; if per-device state has different values on the devices but a sharding that says they are equal; if a step has
            taken the state's memory, or an exchange's state has lost its marks; if two arrays would have one name; if the state
            has the memories of only one of several workers, as after ``flax.jax_utils.unreplicate``; if what was written cannot
            be read back.
    """
    import orbax.checkpoint as ocp

    refuse_donated(state)
    state = _without_empty(state)
    _refuse_lost(state)
    path, record = _files.local_folder(directory), checkpoint_metadata(state)
    with checkpoint_files.turn(path):
        place = checkpoint_files.place_for(path, overwrite=overwrite)
        with checkpoint_files.reached(place.parent) as parent, ocp.StandardCheckpointer() as checkpointer:
            with without_echoes():
                checkpointer.save(parent / place.name, state, custom_metadata=record)
                checkpointer.wait_until_finished()
            refuse_unreadable(checkpointer, place, parent / place.name)
        if place != path:
            checkpoint_files.replace(path, place)


@_arguments.checked
def restore_checkpoint(directory: str | os.PathLike[str], like: PyTree, *, check_method: bool = True) -> PyTree:
    """Reads a state into the structure, dtypes and shardings of ``like``.

    The checkpoint's record is compared: the same methods must have made it and ``like``, and every array must be, bit for bit,
    what was saved. If an option differs that may differ between runs (a density, a momentum, a seed, a dtype on the wire), a
    warning names it. A checkpoint without a record is restored with a warning.

    A checkpoint of another number of workers is resized as by :func:`resize_workers`. The number of processes that wrote it
    does not matter. With several processes all of them call this, and all of them see the directory.

    Example:
        >>> tx = optax.chain(gc.topk_sgd(axis_name="data"), optax.sgd(0.1))
        >>> gc.save_checkpoint(folder / "step-0", gc.init_state(params, tx, mesh))
        >>> state = gc.restore_checkpoint(folder / "step-0", like=gc.init_state(params, tx, mesh))
        >>> int(state.step)
        0

    Args:
        directory: what :func:`save_checkpoint` wrote, or the folder of one step of an ``orbax.checkpoint.CheckpointManager``;
            for a step with several items, the folder of the state.
        like: a state of the same model and optimizer on the present mesh, usually from ``init_state``; its values are not used.
            A Python number in it is restored as a Python number. An array that is bound to no device, as ``model.init`` or
            ``jax.random.key`` leave it, is restored unbound: a step over any mesh takes it.
        check_method: whether to refuse the state of another method, or of other options. If false, arrays of the same names
            and shapes are restored unchecked, whatever they meant.

    Returns:
        A state with the structure, dtypes and shardings of ``like``.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: if the checkpoint belongs to another method, model or optimizer, naming what differs; if the directory has
            several checkpoints, or is a URL; if the checkpoint was replaced each time that it was read.
        DamagedCheckpointError: (a ``ValueError``) if files of the checkpoint are missing or damaged, or an array differs from
            what was saved.
    """
    path = _files.local_folder(directory)
    for _ in range(_TRIES):
        before = checkpoint_files.identity(path)
        try:
            return _restored(checkpoint_files.located(path), like, check_method)
        except (OSError, ValueError) as error:
            if checkpoint_files.identity(path) == before:
                raise
            replaced = error
            if jax.process_count() > 1:
                # Another process may have read the whole checkpoint.
                break
    raise ValueError(
        f"the checkpoint at {path} was replaced while it was read: restore it again, at a time when nobody saves there, or save"
        " every checkpoint under a name of its own"
    ) from replaced


def _restored(path: pathlib.Path, like: PyTree, check_method: bool) -> PyTree:
    import orbax.checkpoint as ocp

    refuse_meeting(like)
    wanted = like
    like = _without_empty(like)
    with checkpoint_files.reached(path) as plain, ocp.StandardCheckpointer() as checkpointer:
        with damage(path):
            metadata, record = described(checkpointer, path, plain)
        if check_method:
            compare_makers(path, record, like)
        named = names_of(metadata)
        refuse_other_stacking(named, like)
        moves = lies_otherwise(named, like)
        saved = metadata if moves else _saved_shapes(named, path, like)
        old, new = (None, None) if moves else (_workers(saved), _workers(like))
        if old is None or new is None:
            old = new = 1
        in_place = not moves and old == new and not has_plain_numbers(saved, like)
        if in_place:
            _same_shapes(saved, like)
        # Otherwise to the host first, in every process, because the saved shapes do not fit the present mesh.
        wants = targets(like) if in_place else jax.tree.map(lambda x: np.empty(x.shape, x.dtype), saved)
        with damage(path):
            found = checkpointer.restore(plain, wants)
            refuse_damaged(found, record)
    if in_place:
        return _with_empty(as_they_were(found, like), wanted)
    if moves:
        found = carried(names_of(found), None if record is None else record.get("owners"), like)
    else:
        found = jax.tree.map(typed, found, like)
        found = found if old == new else resize_workers(found, old=old, new=new)
    _same_shapes(found, like)
    return _with_empty(jax.tree.map(placed, found, like), wanted)


def _refuse_lost(state: PyTree) -> None:
    """Refuses per-device state whose sharding says that devices hold equal values, but whose values differ.

    Only one of the values would be saved. The values are compared, because the sharding alone does not show it: devices do hold
    copies along an axis of the mesh that is not an axis of workers, and along an axis of a single worker.
    """
    # Flax NNX keeps the array inside a variable.
    leaves = tree_leaves_with_path(state, is_leaf=is_per_device)
    marked = [(path, data_of(jax.tree.leaves(leaf.value)[0])) for path, leaf in leaves if is_per_device(leaf)]
    shared = [(path, value) for path, value in marked if isinstance(value, jax.Array) and _has_copies(value)]
    if not shared:
        return
    own = [
        [(shard.device.id, crc_of(np.asarray(shard.data))) for shard in value.addressable_shards] for _, value in shared
    ]
    for (path, value), *found in zip(shared, *_everyone.of_all(own), strict=True):
        by_device, by_index = dict(itertools.chain(*found)), dict[str, set[int]]()
        for device, index in value.sharding.devices_indices_map(value.shape).items():
            by_index.setdefault(str(index), set()).add(by_device[cast(Any, device).id])
        if any(len(digests) > 1 for digests in by_index.values()):
            raise ValueError(
                f"{path_name(path)!r} is another on every device, and its sharding says that devices hold copies"
                f" ({value.sharding}): all but one would be lost. A shard_map with check_vma=False was told so by its"
                " out_specs: give it gradcomp_jax.state_specs(state, axis_name=...) for the state, in in_specs and out_specs"
            )


def _without_empty(state: PyTree) -> PyTree:
    """Returns the state with one entry along each empty dimension, because Orbax saves no arrays without entries."""

    def filled(leaf: Any) -> Any:
        return leaf if np.size(leaf) else np.zeros([size or 1 for size in leaf.shape], leaf.dtype)

    return jax.tree.map(filled, state)


def _with_empty(state: PyTree, like: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf, empty: leaf if np.size(empty) else empty, state, like)


def _has_copies(value: jax.Array) -> bool:
    places = value.sharding.devices_indices_map(value.shape)
    return len({str(index) for index in places.values()}) < len(places)


def _saved_shapes(found: dict[str, Any], path: pathlib.Path, like: PyTree) -> PyTree:
    """Returns the shapes in the checkpoint, in the structure of ``like``."""
    wanted = list(names_of(like))
    missing, surplus = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or surplus:
        differences = [
            f"{verb} {', '.join(map(repr, names[:3]))}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            for verb, names in (("lacks", missing), ("has", surplus))
            if names
        ]
        raise ValueError(
            f"the checkpoint at {path} is of another model or optimizer: it {', and '.join(differences)}; build"
            " the state with the chain that wrote the checkpoint; from that gradcomp_jax.replace_method goes on with another"
            " method, mask, labels or chain"
        )
    shapes = [jax.ShapeDtypeStruct(found[name].shape, found[name].dtype) for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(like), shapes)


def _workers(state: PyTree) -> int | None:
    """Returns the number of workers that all per-device leaves fit; ``None`` without such leaves, or if no number fits.

    Owners' shards alone could fit several numbers; an exchange's state also has one number for each worker.
    """
    marked = [leaf for leaf in nodes_of(state, is_per_device) if leaf.rows]
    sizes = [leaf.value.shape[0] for leaf in marked]

    def fits(workers: int) -> bool:
        joined = (workers * leaf.shards * leaf.held(workers) for leaf in marked)
        places = zip(marked, sizes, joined, strict=True)
        return all(size == rows or lies_stacked(leaf, workers) for leaf, size, rows in places)

    return next((n for n in range(1, max(sizes, default=0) + 1) if fits(n)), None)


def _same_shapes(found: PyTree, like: PyTree) -> None:
    pairs = zip(tree_leaves_with_path(found), jax.tree.leaves(like), strict=True)
    for (path, a), b in pairs:
        # The dtype of a Python number is the one that it had when it was saved.
        number = isinstance(b, (bool, int, float))
        (shape, dtype), (wanted, wanted_dtype) = _stored(a), _stored(b)
        if shape != wanted or (dtype != wanted_dtype and not number):
            raise ValueError(
                f"the checkpoint's {path_name(path)} is {dtype}{list(shape)}, the state's {wanted_dtype}{list(wanted)}:"
                " it is of another model, block or number of workers"
            )


def _stored(leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Returns the shape and dtype that a leaf is saved with; for a typed key, those of its data."""
    if is_typed_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    shaped = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return tuple(shaped.shape), shaped.dtype
