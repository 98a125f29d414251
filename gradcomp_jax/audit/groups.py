"""Which devices take part in a collective together, from every syntax HLO has for it.

A device is its flattened number ``replica * num_partitions + partition``: its position in the
program's device assignment, not its hardware id.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterable

import numpy as np

from gradcomp_jax.audit.hlo import Instruction, Module
from gradcomp_jax.audit.syntax import parse_int_lists, split_commas

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"(?:mesh\[(?P<axes>.*?)\]|@mesh<(?P<old_axes>.*?)>)"
    r"(?:,\s*device_ids=\((?P<ids>.*?\)?)\))?\s*\{(?P<along>.*)\}"
)
_AXIS_REFERENCE = re.compile(r"(?P<name>.*?)(?::\((?P<before>\d+)\)(?P<size>\d+))?")
# These have no use_global_device_ids: with a channel, their ids are partitions.
_PARTITION_KINDS = ("all-to-all", "collective-permute", "collective-broadcast")


def device_groups(instruction: Instruction, kind: str, module: Module) -> Groups:
    """Returns the groups of devices of a collective, or its ``-start``, each sorted, and sorted among themselves.

    ``kind`` is the opcode without ``-start``. An empty list of groups means all devices of the module.

    Raises:
        ValueError: if ``replica_groups`` has an unknown syntax.
    """
    attributes = instruction.attributes
    text = attributes.get("replica_groups", "{}")
    if "device_ids" in attributes and "{" not in text:
        # The comma before device_ids looks like the end of an attribute.
        text = f"{text}, device_ids={attributes['device_ids']}"
    try:
        groups = parse_groups(text)
    except ValueError as error:
        raise ValueError(f"{error}, in the HLO instruction {instruction.name}") from error
    return _flattened(groups, instruction, kind, module)


def _flattened(groups: Groups, instruction: Instruction, kind: str, module: Module) -> Groups:
    """Turns the ids that the groups are written in into flattened device numbers."""
    replicas, partitions = range(module.replica_count), range(module.num_partitions)
    across = module.num_partitions
    channel = "channel_id" in instruction.attributes
    if instruction.attributes.get("use_global_device_ids") == "true":
        devices = tuple(range(module.replica_count * across))
        return normalised(groups or (devices,))
    if channel and kind in _PARTITION_KINDS:
        groups = groups or (tuple(partitions),)
        return normalised(tuple(r * across + p for p in g) for r in replicas for g in groups)
    groups = groups or (tuple(replicas),)
    if channel:
        return normalised(tuple(r * across + p for r in g for p in partitions) for g in groups)
    return normalised(tuple(r * across + p for r in g) for p in partitions for g in groups)


def normalised(groups: Iterable[tuple[int, ...]]) -> Groups:
    """Sorts every group, then the groups; empty groups are left out."""
    return tuple(sorted(tuple(sorted(group)) for group in groups if group))


def connected(pairs: Groups) -> Groups:
    """Returns the sets of devices that ``(source, target)`` pairs join, as groups."""
    leader: dict[int, int] = {}

    def find(device: int) -> int:
        leader.setdefault(device, device)
        while leader[device] != device:
            leader[device] = leader[leader[device]]
            device = leader[device]
        return device

    for source, target in pairs:
        leader[find(source)] = find(target)
    members: dict[int, list[int]] = {}
    for device in leader:
        members.setdefault(find(device), []).append(device)
    return normalised(tuple(group) for group in members.values())


@functools.lru_cache(maxsize=512)
def parse_groups(text: str) -> Groups:
    """Reads ``replica_groups`` in any of its syntaxes, in the order written.

    ``{{0,1},{2,3}}`` lists the groups. ``[4,2]<=[2,4]T(1,0)`` is an iota of shape ``[2,4]``, transposed, then cut into 4 groups
    of 2. ``mesh['a'=2,'b'=4] {'b'}`` groups the devices of a mesh along axes; an axis may be a part of one, ``'b':(2)2``.

    Raises:
        ValueError: if the text has none of these forms.
    """
    text = text.strip()
    if (mesh := _MESH.fullmatch(text)) is not None:
        return _mesh_groups(mesh)
    if (iota := _IOTA.fullmatch(text)) is not None and iota[2]:
        array = _iota(iota)
        return tuple(tuple(int(n) for n in row) for row in array.reshape(array.shape[0], -1))
    try:
        return parse_int_lists(text)
    except ValueError:
        raise ValueError(f"unknown syntax of replica_groups: {text!r}") from None


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n.strip()]


def _iota(match: re.Match[str]) -> np.ndarray:
    """Builds the array of ``[shape]<=[source]T(permutation)``; the source may be left out."""
    shape = _ints(match[1])
    # Device lists of a mesh are written [4,16]T(1,0): source and transpose, then flat.
    source = _ints(match[2]) if match[2] else shape
    array = np.arange(math.prod(source)).reshape(source)
    if match[3]:
        array = array.transpose(_ints(match[3]))
    return array.reshape(shape) if match[2] else array.reshape(-1)


def _mesh_groups(match: re.Match[str]) -> Groups:
    names, sizes = [], []
    for axis in split_commas(match["axes"] or match["old_axes"] or ""):
        name, _, size = axis.rpartition("=")
        names.append(name.strip().strip("'"))
        sizes.append(int(size))
    devices = np.arange(math.prod(sizes))
    if ids := match["ids"]:
        iota = _IOTA.fullmatch(ids)
        devices = _iota(iota).reshape(-1) if iota else np.array(_ints(ids))
    # Every axis is cut where a reference cuts it, so that each reference is whole dimensions.
    references = [_axis_reference(ref, names, sizes) for ref in split_commas(match["along"])]
    dims, starts = _cut(sizes, references)
    along = [
        position
        for axis, before, size in references
        for position, (a, b) in enumerate(starts)
        if a == axis and before <= b < before * size
    ]
    rest = [position for position in range(len(dims)) if position not in along]
    count = math.prod(dims[position] for position in rest)
    table = devices.reshape(dims).transpose([*rest, *along]).reshape(count, -1)
    return tuple(tuple(int(n) for n in row) for row in table)


def _axis_reference(text: str, names: list[str], sizes: list[int]) -> tuple[int, int, int]:
    """Reads ``'b'`` or ``'b':(2)4``: the axis, the product of the sizes before the part, and its size."""
    match = _AXIS_REFERENCE.fullmatch(text.replace("'", "").strip())
    if match is None or match["name"] not in names:
        raise ValueError(f"replica_groups name an axis {text!r} outside their mesh {names}")
    axis = names.index(match["name"])
    if match["size"] is None:
        return axis, 1, sizes[axis]
    return axis, int(match["before"]), int(match["size"])


def _cut(sizes: list[int], references: list[tuple[int, int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
    """Cuts the axes at the ends of the references.

    Returns:
        The dimensions, major to minor, and for each its axis and the product of the sizes before it within that axis.
    """
    dims, starts = [], []
    for axis, size in enumerate(sizes):
        cuts = {1, size}
        for of, before, part in references:
            if of == axis:
                cuts |= {before, before * part}
        ordered = sorted(cuts)
        if any(after % before for before, after in itertools.pairwise(ordered)):
            raise ValueError(f"parts of a mesh axis of size {size} do not fit into one another")
        for before, after in itertools.pairwise(ordered):
            dims.append(after // before)
            starts.append((axis, before))
    return dims, starts
