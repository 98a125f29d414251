"""The marker on state that differs by device."""

import dataclasses
from typing import Literal

import jax

from gradcomp_jax._typing import Array

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
        shares: devices that make up one worker, of which each has such a value for its part of every tensor; 1 unless
            the exchange is hierarchical.
    """

    value: Array
    rows: int = dataclasses.field(metadata={"static": True})
    kind: Kind = dataclasses.field(default="worker", metadata={"static": True})
    shares: int = dataclasses.field(default=1, metadata={"static": True})


def is_per_device(node: object) -> bool:
    """Whether a node of a state tree is a :class:`PerDevice`, for ``is_leaf``."""
    return isinstance(node, PerDevice)
