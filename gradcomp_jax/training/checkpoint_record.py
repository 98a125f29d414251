"""The record of a checkpoint: which methods made the state, and a digest of every array."""

import collections
import dataclasses
import json
import pathlib
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp_jax import _arguments, _checks, _everyone
from gradcomp_jax._checks import is_typed_key
from gradcomp_jax._typing import PyTree
from gradcomp_jax.core import ExchangeState
from gradcomp_jax.core.made_by import MadeBy, made_by
from gradcomp_jax.methods.registry import DRAWN, METHODS, SENT
from gradcomp_jax.per_device import nodes_within
from gradcomp_jax.replicas import MARKED
from gradcomp_jax.training.carried import names_of, owners_of
from gradcomp_jax.training.refusals import refuse_donated, refuse_unmarked
from gradcomp_jax.training.unreplicated import refuse_unreplicated
from gradcomp_jax.transforms import SwitchedState
from gradcomp_jax.transforms.worker_shards import DIVISION, ShardState

FILE = "_CHECKPOINT_METADATA"
"""The file in which Orbax keeps custom metadata, in a checkpoint or in the folder of a manager's step."""

_KEY = "gradcomp_jax"

_OF_PARTS = frozenset((*SENT, *DRAWN, "k", "k_downlink", "clip", "momentum", "decay", "every"))
"""Options of exchanges, their parts and wrappers with which stored state means the same; methods say theirs."""


@_arguments.checked
def checkpoint_metadata(state: PyTree) -> dict[str, Any]:
    """Returns the record of a state, for ``custom_metadata`` of an ``orbax.checkpoint.CheckpointManager``.

    ``manager.save(step, args=ocp.args.StandardSave(state), custom_metadata=gc.checkpoint_metadata(state))`` writes what
    :func:`save_checkpoint` writes: the methods of the state's exchanges with their options, and the shape and dtype of every
    array with the CRC-32 of each shard, which :func:`restore_checkpoint` compares. The arrays are read once, each by a
    process that holds it; with several processes all of them call this.

    Example:
        >>> state = gc.init_state(params, optax.chain(gc.topk_sgd(axis_name="data"), optax.sgd(0.1)), mesh)
        >>> sorted(gc.checkpoint_metadata(state))
        ['gradcomp_jax']

    Args:
        state: the state to save, before a step takes its memory.

    Returns:
        A dictionary for JSON.

    Raises:
        ValueError: if a step has taken the state's memory, an exchange's state has lost its marks, two arrays would have one
            name, or the state has the memories of only one of several workers.
    """
    refuse_donated(state)
    refuse_meeting(state)
    refuse_unreplicated(state)
    makers = [list(maker) for maker in _makers(state)]
    record = {"made_by": makers, "arrays": _arrays(state), "owners": owners_of(state)}
    return {_KEY: {"record": record, "crc32": _crc_of(record)}}


def refuse_meeting(state: PyTree) -> None:
    """Refuses a state if two of its arrays would be saved under one name, or if a leaf cannot be saved.

    Orbax joins the keys of a path with dots and uses the result as the path of a file. The record of a checkpoint joins them
    with slashes. So keys that contain dots or slashes may give equal names.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    if not jax.tree.leaves(state, is_leaf=lambda x: x is None):
        raise ValueError("the state has no arrays: there is nothing to save or restore")
    meeting = collections.defaultdict[tuple[str, str], list[str]](list)
    for path, leaf in leaves:
        keys, shown = [jax.tree_util.keystr((key,), simple=True) for key in path], jax.tree_util.keystr(path)
        if not (hasattr(leaf, "dtype") or isinstance(leaf, (bool, int, float, complex))):
            raise ValueError(
                f"{shown or 'the state'} is a {type(leaf).__name__}: a checkpoint holds arrays and numbers; take it out of the"
                " state, and keep it in a file of its own"
            )
        try:
            "".join(keys).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{shown} of the state has a name that is not Unicode: rename it") from error
        meeting["files", re.sub("/+", "/", f"/{'.'.join(keys)}/")].append(shown)
        meeting["names", "/".join(keys)].append(shown)
    for found in meeting.values():
        if len(found) > 1:
            raise ValueError(
                f"{found[0]} and {found[1]} of the state would be one array in a checkpoint, which joins the keys of a path:"
                " rename one of them"
            )


def read_record(path: pathlib.Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | None:
    """Returns the record of a checkpoint; ``None`` if it has none.

    Args:
        path: the folder with the arrays: the checkpoint, or an item of a manager's step.
        shapes: the shapes of the arrays that are there, by name.
    """
    for folder in (path, path.parent):
        if not (folder / FILE).is_file():
            continue
        try:
            written = json.loads((folder / FILE).read_bytes())
            kept = (written.get("custom_metadata") or {}).get(_KEY)
            whole = kept is None or _crc_of(kept["record"]) == kept["crc32"]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{FILE} cannot be read") from error
        if not whole:
            raise ValueError(f"{FILE} differs from what was saved")
        if kept is None:
            return None
        same = {name: tuple(entry["shape"]) for name, entry in kept["record"]["arrays"].items()} == shapes
        if not same and folder == path:
            raise ValueError("the list of its arrays differs from what was saved")
        # A step of several items has one record, which is of one of the items.
        return kept["record"] if same else None
    return None


def compare_makers(path: pathlib.Path, record: Mapping[str, Any] | None, like: PyTree) -> None:
    """Refuses a state that another method made; warns if options that may differ do differ, and if there is no record."""
    wanted = _makers(like)
    if record is None:
        if wanted:
            _checks.warn(
                f"the checkpoint at {path} does not say which method made it, and has no digests: an earlier version wrote it,"
                " or a CheckpointManager without custom_metadata=gradcomp_jax.checkpoint_metadata(state). It is restored"
                " unchecked; save it again with gradcomp_jax.save_checkpoint"
            )
        return
    saved = [(name, dict(options)) for name, options in record["made_by"]]
    if all(name != DIVISION for name, _ in saved):
        # Earlier versions did not say how tensors were divided.
        wanted = [maker for maker in wanted if maker[0] != DIVISION]
    # If there are more or fewer makers, the arrays differ too, and the error names them.
    for (name, options), (wanted_name, wanted_options) in zip(saved, wanted, strict=False):
        differing = [
            option
            for option in dict.fromkeys([*options, *wanted_options])
            if _said(name, options, option) != _said(wanted_name, wanted_options, option)
        ]
        strict = [option for option in differing if not _may_change(name, option)]
        if name != wanted_name:
            strict, differing = [], []
        if name != wanted_name or strict:
            raise ValueError(
                f"the checkpoint at {path} was saved with {_called(name, options, strict)}, and is to be restored into"
                f" {_called(wanted_name, wanted_options, strict)}: build the state with what wrote it, from which"
                " gradcomp_jax.replace_method goes on with another method, or pass check_method=False to take its arrays as"
                " they are"
            )
        if differing:
            _checks.warn(
                f"the checkpoint at {path} was saved with {_called(name, options, differing)}, and goes on with"
                f" {_called(wanted_name, wanted_options, differing)}"
            )


def refuse_damaged(tree: PyTree, record: Mapping[str, Any] | None) -> None:
    """Compares restored arrays with their digests: each process compares its shards, and all have the same outcome."""
    if record is None:
        return
    named = list(names_of(tree).items())
    damaged = next((i for i, (name, leaf) in enumerate(named) if not _is_whole(leaf, record["arrays"][name])), -1)
    damaged = max(_everyone.of_all(damaged))
    if damaged >= 0:
        raise ValueError(f"its array {named[damaged][0]!r} differs from what was saved")


_LATER = {"memory_dtype": "float32", "memory.dtype": "float32", "compressor.pack_positions": "False", "delay": "0"}
"""Options that earlier versions did not have, with the value that means what those versions did."""

_LEFT_OUT = {("block_quantized", "bits"): "8", ("block_quantized", "block"): "256"}
"""What ``None`` stands for in an option of a method, where earlier versions had the number as its default."""


def _may_change(maker: str, option: str) -> bool:
    """Returns whether stored state means the same with another value of an option; with another memory dtype it does not."""
    known = METHODS[maker].may_change if maker in METHODS else _OF_PARTS
    return option != "memory.dtype" and option.rpartition(".")[2] in known


def _said(maker: str, options: Mapping[str, str], option: str) -> str | None:
    """Returns an option's value, or what it stands for; a checkpoint older than the option has the default."""
    said = options.get(option, _LATER.get(option))
    return _LEFT_OUT.get((maker, option), said) if said == "None" else said


def _makers(state: PyTree) -> list[tuple[str, dict[str, str]]]:
    """Returns the methods of a state in the order of its tree: exchanges, and wrappers that describe their state."""
    refuse_unmarked(state)
    found = nodes_within(state, lambda node: isinstance(node, (ExchangeState, ShardState, SwitchedState, *MARKED)))
    said = (ExchangeState, ShardState)
    makers = [node.made_by if isinstance(node, said) else _of_static(node) for node in found]
    return [(maker.name, dict(maker.options)) for maker in makers]


def _of_static(node: Any) -> MadeBy:
    """Returns the type and the static fields of a state."""
    static = [field.name for field in dataclasses.fields(node) if field.metadata.get("static")]
    return made_by(type(node).__name__, {name: getattr(node, name) for name in static})


def _called(name: str, options: Mapping[str, str], shown: list[str]) -> str:
    """Returns a method as it would be called, with some of its options."""
    return f"{name}({', '.join(f'{option}={options[option]}' for option in shown if option in options)})"


def _crc_of(record: Any) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _arrays(state: PyTree) -> dict[str, Any]:
    """Returns for every array its shape, dtype, number of shards along each dimension, and their digests in C order."""
    found: dict[str, Any] = {}
    digests: dict[str, dict[str, int]] = {}
    for name, leaf in names_of(state).items():
        array = data_of(leaf)
        counts = [1] * array.ndim
        if isinstance(array, jax.Array):
            shard = array.sharding.shard_shape(array.shape)
            counts = [size // part if part else 1 for size, part in zip(array.shape, shard, strict=True)]
        found[name] = {"shape": list(array.shape), "dtype": str(array.dtype), "shards": counts}
        digests[name] = {
            str(_number(place, counts, array.shape)): crc_of(data) for place, data in _pieces(array, first=True)
        }
    for every in _everyone.of_all(digests):
        for name, some in every.items():
            digests[name] |= some
    for name, entry in found.items():
        entry["crc32"] = [digests[name][str(number)] for number in range(len(digests[name]))]
    return found


def _is_whole(leaf: Any, entry: Mapping[str, Any]) -> bool:
    array = data_of(leaf)
    if list(array.shape) != entry["shape"]:
        return False
    for place, data in _pieces(array):
        for cell, digest in zip(_cells(entry), entry["crc32"], strict=True):
            if _holds(place, cell) and crc_of(data[_within(cell, place)].astype(jnp.dtype(entry["dtype"]))) != digest:
                return False
    return True


Place = tuple[tuple[int, int], ...]
"""The start and end of a part of an array along every dimension."""


def _cells(entry: Mapping[str, Any]) -> Iterator[Place]:
    """Yields the places of an array's shards, in C order."""
    sizes = [size // count for size, count in zip(entry["shape"], entry["shards"], strict=True)]
    for index in np.ndindex(*entry["shards"]):
        yield tuple((i * size, (i + 1) * size) for i, size in zip(index, sizes, strict=True))


def _number(place: Place, counts: list[int], shape: tuple[int, ...]) -> int:
    """Returns the number, in C order, of the shard at a place of an array."""
    starts = [start * count // max(size, 1) for (start, _), count, size in zip(place, counts, shape, strict=True)]
    return int(np.ravel_multi_index(starts, counts)) if starts else 0


def _pieces(array: Any, *, first: bool = False) -> Iterator[tuple[Place, np.ndarray]]:
    """Yields the parts of an array that this process holds; with ``first`` each part in one process only."""
    if not isinstance(array, jax.Array) or (array.is_fully_addressable and not first):
        yield tuple((0, size) for size in array.shape), np.asarray(array)
        return
    for shard in array.addressable_shards:
        if not first or shard.replica_id == 0:
            bounds = (part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True))
            yield tuple(bounds), np.asarray(shard.data)


def _holds(place: Place, cell: Place) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(place, cell, strict=True))


def _within(cell: Place, place: Place) -> tuple[slice, ...]:
    return tuple(slice(c - a, d - a) for (a, _), (c, d) in zip(place, cell, strict=True))


def crc_of(data: np.ndarray) -> int:
    """Returns the CRC-32 of an array's bytes, in C order."""
    return zlib.crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)


def data_of(leaf: Any) -> Any:
    """Returns the leaf as an array; for a typed key its data."""
    if is_typed_key(leaf):
        return jax.random.key_data(leaf)
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
