"""The marker on state that differs by device."""

import dataclasses
from typing import Literal

import jax

from gradcomp_jax._typing import Array

Kind = Literal["worker", "share"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerDevice:
    """A value of which every device holds its own, kept as rows.

    Inside ``shard_map``, ``pmap`` and ``vmap`` the update function sees one device's rows. Outside, under
    ``shard_map``, the devices' rows lie one after the other on the leading dimension, with the partition
    spec ``P(axis)``; under ``pmap`` and ``vmap`` they are stacked on a new leading dimension.

    Attributes:
        value: the array; shape ``[rows, ...]`` on one device.
        rows: for kind ``worker`` the rows that each device holds, for ``share`` the rows that all the
            devices hold between them, before padding to a multiple of their number.
        kind: ``worker``: each device has its own value for every row (a residual, a velocity), and what a
            change of the number of workers must preserve is their mean. ``share``: each device has the
            only value of its share of the rows (a server residual), and each row must be preserved.
    """

    value: Array
    rows: int = dataclasses.field(metadata={"static": True})
    kind: Kind = dataclasses.field(default="worker", metadata={"static": True})


def is_per_device(node: object) -> bool:
    """Whether a node of a state tree is a :class:`PerDevice`, for ``is_leaf``."""
    return isinstance(node, PerDevice)
