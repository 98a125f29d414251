"""The state of an exchange before the first step."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax import _compat
from gradcomp_jax._typing import Array, AxisName
from gradcomp_jax.core import passes
from gradcomp_jax.core.layout import Group, Layout, Segment
from gradcomp_jax.memory import narrow
from gradcomp_jax.per_device import PerDevice, Return, is_per_device


def init_memory(group: Group, segment: Segment, axis_name: AxisName | None) -> Any:
    """Returns the memory of a segment before the first step."""
    rows = group.memory_rows(segment)
    block = group.compressor.block
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
    rows = tuple(group.rows(s) for s in segments)
    returns = Return(least, rows, group.dealt, -1 if group.memory.counts_sent else 1)
    mark = PerDevice(jnp.zeros(()), sum(rows), "shard", returns=returns)
    zeros = jnp.zeros((mark.held(workers), group.compressor.block), jnp.float32)
    kept = _compat.varying(narrow.zeros(zeros, group.memory.dtype), axis_name)
    return jax.tree.map(lambda a: dataclasses.replace(mark, value=a), kept)


MOST = 2**14
"""Most entries of a tensor that are sampled."""


def ratio_of(layout: Layout, memory: Sequence[Sequence[Any]], gradient: Sequence[Array], before: Any, ok: Array) -> Any:
    """Estimates the norm of a worker's memories over that of its gradient: ``PerDevice`` float32 ``[1]``.

    Both norms are from at most ``MOST`` entries of each tensor, evenly spread, so the estimate costs no pass. It stays
    what it was (``before``) where the exchange was skipped (``ok`` is false), or the sampled entries have no gradient.
    ``memory`` is the new state of each group and segment.
    """
    kept, seen = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    for (group, segments), states in zip(layout.groups, memory, strict=True):
        for segment, state in zip(segments, states, strict=True):
            if group.memory.keeps:
                rows = group.memory.held(narrow.opened(jax.tree.map(lambda p: p.value, state, is_leaf=is_per_device)))
                kept += sum_of_squares(rows)
                seen += sum((sum_of_squares(gradient[i]) for i in segment.leaves), jnp.zeros((), jnp.float32))
    ratio = jnp.sqrt(kept / jnp.where(seen > 0, seen, 1.0))
    usable = ok & (seen > 0) & jnp.isfinite(ratio)
    return dataclasses.replace(before, value=jnp.where(usable, ratio, before.value))


def sum_of_squares(x: Array) -> Array:
    """Estimates the sum of an array's squares from a grid of its entries: slices without a reshape, which could be a copy."""
    if not x.size:
        return jnp.zeros((), jnp.float32)
    # The leading dimension is thinned out first: whole lines are cheap to read.
    wanted, strides = MOST, []
    for n in reversed(x.shape):
        strides.append(-(-n // min(n, max(1, wanted))))
        wanted //= max(1, -(-n // strides[-1]))
    where = [passes.places(x.shape, stride, axis) for axis, stride in enumerate(reversed(strides))]
    grid = passes.taken(x, where).astype(jnp.float32)
    return jnp.sum(grid * grid) * (x.size / math.prod(grid.shape))
