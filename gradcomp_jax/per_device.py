"""The marker on state that differs by device."""

import dataclasses
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from gradcomp_jax._typing import Array, AxisName

Kind = Literal["worker", "share", "replica"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerDevice:
    """A value of which every device holds its own, kept as rows.

    Inside ``shard_map``, ``pmap`` and ``vmap`` the update function sees one device's rows. Outside, under
    ``shard_map``, the devices' rows lie one after the other on the leading dimension, with the partition
    spec ``P(axis)``; under ``pmap`` and ``vmap`` they are stacked on a new leading dimension.

    Attributes:
        value: the array; shape ``[rows, ...]`` on one device.
        rows: for kind ``worker`` and ``replica`` the rows that each device holds, for ``share`` the rows that all the
            workers hold between them, before padding to a multiple of their number.
        kind: ``worker``: each worker has its own value for every row (a residual, a velocity), and what a
            change of the number of workers must preserve is their mean. ``share``: each worker has the
            only value of its share of the rows (a server residual), and each row must be preserved. ``replica``: all
            workers have the same value, which differs only by the device within a worker.
        entries: of a ``worker`` value whose rows are cut by owner (as many for each, its share of a tensor and padding): the
            tensor's entries; 0 of every other.
        shares: devices that make up one worker, of which each has such a value for its part of every tensor; 1 unless
            the exchange is hierarchical.
    """

    value: Array
    rows: int = dataclasses.field(metadata={"static": True})
    kind: Kind = dataclasses.field(default="worker", metadata={"static": True})
    shares: int = dataclasses.field(default=1, metadata={"static": True})
    entries: int = dataclasses.field(default=0, metadata={"static": True})

    def held(self, workers: int) -> int:
        """Rows that each device would hold, were there so many workers."""
        if self.entries:
            return workers * -(-self.entries // (workers * self.value.shape[-1]))
        return -(-self.rows // workers) if self.kind == "share" else self.rows


def is_per_device(node: object) -> bool:
    """Whether a node of a state tree is a :class:`PerDevice`, for ``is_leaf``."""
    return isinstance(node, PerDevice)


def state_specs(state: Any, *, axis_name: AxisName) -> Any:
    """The partition spec of every leaf: ``P(axis_name)`` for per-device state, ``P()`` for all else.

    Args:
        state: any tree with :class:`PerDevice` nodes in it, of arrays or shapes.
        axis_name: the axis of the workers.

    Returns:
        A tree of the same structure, for ``in_specs`` and ``out_specs`` of ``jax.shard_map``.
    """

    def spec(leaf: Any) -> Any:
        if is_per_device(leaf):
            return dataclasses.replace(leaf, value=PartitionSpec(axis_name))
        return PartitionSpec()

    return jax.tree.map(spec, state, is_leaf=is_per_device)
