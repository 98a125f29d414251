"""What an exchange keeps, before the first step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax import _compat
from gradcomp_jax._typing import AxisName
from gradcomp_jax.per_device import PerDevice, Return
from gradcomp_jax.transforms.layout import Group, Layout, Segment


def init_memory(group: Group, segment: Segment, axis_name: AxisName | None) -> Any:
    """Returns the memory of a segment before the first step."""
    rows = group.memory_rows(segment)
    zeros = _compat.varying(group.memory.init(jnp.zeros((rows, group.compressor.block), jnp.float32)), axis_name)
    return jax.tree.map(lambda a: PerDevice(a, rows, entries=segment.size if segment.shards else 0), zeros)


def init_server(group: Group, segments: list[Segment], workers: int, axis_name: AxisName | None) -> Any:
    """Returns what owners hold of a group before the first step; ``()`` where they hold nothing."""
    least = group.collective.owners_from(group.compressor, group.memory)
    if not segments or least is None:
        return ()
    rows = tuple(group.rows(s) for s in segments)
    returns = Return(least, rows, group.dealt, -1 if group.memory.counts_sent else 1) if least > 1 else None
    mark = PerDevice(jnp.zeros(()), sum(rows), "shard", returns=returns)
    zeros = jnp.zeros((mark.held(workers), group.compressor.block), jnp.float32)
    return dataclasses.replace(mark, value=_compat.varying(zeros, axis_name))


def refuse_other_layout(layout: Layout, memories: tuple) -> None:
    """Refuses memories of other tensors than the gradient's.

    Raises:
        ValueError: if groups, segments or rows differ.
    """
    expected = [[group.memory_rows(s) for s in segments] for group, segments in layout.groups]
    fits = [len(of) for of in memories] == [len(of) for of in expected]
    every = zip((m for of in memories for m in of), (rows for of in expected for rows in of), strict=fits)
    if not fits or any(leaf.shape[0] != rows for memory, rows in every for leaf in jax.tree.leaves(memory)):
        raise ValueError(
            "the exchange's state is of other tensors than the gradient: initialise it with parameters of the same shapes."
            " Parameters that lie along the exchange's own axis (FSDP) need"
            " collective=gradcomp_jax.collectives.ReduceScatter(param_specs), those along the inner axis of a hierarchy"
            " param_specs= of gradcomp_jax.hierarchical"
        )
