"""The marker on state that differs by device."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gradcomp_jax import _registered
from gradcomp_jax._typing import Array, AxisName

Kind = Literal["worker", "shard", "replica"]


@dataclasses.dataclass(frozen=True)
class Return:
    """Says how the rows that owners hold return to the workers' memories if the owners change or there are none.

    Attributes:
        least: the number of workers from which there are owners.
        rows: how many of the owners' rows belong to each memory, in the order of the memories.
        dealt: whether the owners' rows are dealt out over each memory.
        sign: 1 if a memory holds what was kept, -1 if it holds what counts as sent.
    """

    least: int
    rows: tuple[int, ...]
    dealt: bool
    sign: int


@_registered.node
@dataclasses.dataclass(frozen=True)
class PerDevice:
    """Holds a value that differs by device, kept as rows.

    Inside ``shard_map``, ``pmap`` and ``vmap`` the update function sees one device's rows. Outside, under
    ``shard_map``, the devices' rows lie one after the other on the leading dimension, with the partition
    spec ``P(axis)``; under ``pmap`` and ``vmap`` they are stacked on a new leading dimension.

    ``PerDevice(x, rows=1, lifted=True)`` marks an array ``[N, ...]`` as one value for each of N workers, such as gradients for
    :func:`gradcomp_jax.unreduced`.

    Attributes:
        value: the array; shape ``[rows, ...]`` on one device.
        rows: for kind ``worker`` and ``replica`` the rows that each device holds; for ``shard`` the rows that all
            workers hold together, before padding to a multiple of their number.
        kind: ``worker``: each worker has its own value for every row (a residual, a velocity); a change of the number of
            workers must preserve their mean. ``shard``: each worker has the only value of its shard of the rows, which
            the workers take in turn (a server residual); each row must be preserved. ``replica``: all workers have the
            same value, which differs only by the device within a worker.
        entries: the tensor's entries, for a ``worker`` value whose rows are cut by owner (equally many for each owner: its
            shard of a tensor and padding); 0 for all other values.
        shards: devices that make up one worker; each has such a value for its part of every tensor. 1 unless the
            exchange is hierarchical.
        returns: for a ``shard`` that an exchange's owners hold: how it returns if the owners change. Below the least
            number of workers that have owners, each worker holds one row of zeros.
        lifted: whether the value has no rows itself: :func:`lift` added the one row, and :func:`lower` removes it.
    """

    value: Array
    rows: int = dataclasses.field(metadata={"static": True})
    kind: Kind = dataclasses.field(default="worker", metadata={"static": True})
    shards: int = dataclasses.field(default=1, metadata={"static": True})
    entries: int = dataclasses.field(default=0, metadata={"static": True})
    returns: Return | None = dataclasses.field(default=None, metadata={"static": True})
    lifted: bool = dataclasses.field(default=False, metadata={"static": True})

    def held(self, workers: int) -> int:
        """Returns the rows that each device would hold with this number of workers."""
        if self.entries:
            return workers * -(-self.entries // (workers * self.value.shape[-1]))
        if self.returns and workers < self.returns.least:
            return 1
        return -(-self.rows // workers) if self.kind == "shard" else self.rows


def is_per_device(node: object) -> bool:
    """Returns whether a node of a state tree is a :class:`PerDevice`, for ``is_leaf``."""
    return isinstance(node, PerDevice)


def nodes_of(tree: Any, is_node: Callable[[Any], bool]) -> list[Any]:
    """Returns the nodes of a state tree that a predicate holds for."""
    return [node for node in jax.tree.leaves(tree, is_leaf=is_node) if is_node(node)]


def nodes_within(tree: Any, is_node: Callable[[Any], bool]) -> list[Any]:
    """Returns the nodes of a state tree that a predicate holds for, including nodes within such nodes."""
    found = []
    for node in nodes_of(tree, is_node):
        children = jax.tree.leaves(node, is_leaf=functools.partial(operator.is_not, node))
        found += [node, *(inner for child in children for inner in nodes_within(child, is_node))]
    return found


def lift(tree: Any, *, marked: tuple[type, ...] = ()) -> Any:
    """Marks every array of a tree as differing by device: each becomes a :class:`PerDevice` of one row.

    Args:
        tree: one device's arrays. What is per-device already is passed through.
        marked: types of nodes that themselves mark what differs by device; they are passed through as well.
    """

    def is_leaf(node: object) -> bool:
        return isinstance(node, (PerDevice, *marked))

    def up(leaf: Any) -> Any:
        return leaf if is_leaf(leaf) else PerDevice(jnp.asarray(leaf)[None], 1, lifted=True)

    return jax.tree.map(up, tree, is_leaf=is_leaf)


def lower(tree: Any) -> Any:
    """Inverts :func:`lift`, on one device's values."""

    def down(leaf: Any) -> Any:
        return leaf.value[0] if is_lifted(leaf) else leaf

    return jax.tree.map(down, tree, is_leaf=is_per_device)


def is_lifted(node: object) -> bool:
    """Returns whether a node of a state tree comes from :func:`lift`."""
    return isinstance(node, PerDevice) and node.lifted


def state_specs(state: Any, *, axis_name: AxisName) -> Any:
    """Returns the partition spec of every leaf; see :func:`gradcomp_jax.state_specs`."""

    def spec(leaf: Any) -> Any:
        if is_per_device(leaf):
            return dataclasses.replace(leaf, value=PartitionSpec(axis_name))
        return PartitionSpec()

    return jax.tree.map(spec, state, is_leaf=is_per_device)
