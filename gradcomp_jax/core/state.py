"""The state of an exchange before the first step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax import _compat
from gradcomp_jax._typing import Array, AxisName
from gradcomp_jax.core.layout import Group, Segment
from gradcomp_jax.memory import narrow
from gradcomp_jax.per_device import PerDevice, Return


def init_memory(group: Group, segment: Segment, axis_name: AxisName | None) -> Any:
    """Returns the memory of a segment before the first step."""
    rows, block = segment.memory_rows, group.compressor.block
    zeros = narrow.zeros(group.memory.init(jnp.zeros((rows, block), jnp.float32)), group.memory.dtype)
    entries = segment.size if segment.shards else 0

    def mark(a: Array) -> PerDevice:
        # A row of scales has the same owner as its row of values.
        return PerDevice(a, rows, entries=entries if a.shape[-1] == block else -(-entries // block) * a.shape[-1])

    return jax.tree.map(mark, _compat.varying(zeros, axis_name))


def init_server(group: Group, segments: list[Segment], workers: int, axis_name: AxisName | None) -> Any:
    """Returns what owners hold of a group before the first step; ``()`` where they hold nothing."""
    least = group.collective.owners_from(group.compressor, group.memory)
    if not segments or least is None:
        return ()
    rows = tuple(s.rows for s in segments)
    returns = Return(least, rows, group.dealt, -1 if group.memory.counts_sent else 1)
    mark = PerDevice(jnp.zeros(()), sum(rows), "shard", returns=returns)
    zeros = jnp.zeros((mark.held(workers), group.compressor.block), jnp.float32)
    kept = _compat.varying(narrow.zeros(zeros, group.memory.dtype), axis_name)
    return jax.tree.map(lambda a: dataclasses.replace(mark, value=a), kept)
