"""What an exchange keeps, before the first step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax import _compat, kernels
from gradcomp_jax._typing import Array, AxisName
from gradcomp_jax.memory import narrow
from gradcomp_jax.per_device import PerDevice, Return, is_per_device, nodes_of
from gradcomp_jax.transforms.layout import Group, Layout, Segment


def init_memory(group: Group, segment: Segment, axis_name: AxisName | None) -> Any:
    """Returns the memory of a segment before the first step."""
    rows = group.memory_rows(segment)
    block = group.compressor.block
    zeros = narrow.zeros(group.memory.init(jnp.zeros((rows, block), jnp.float32)), group.memory.dtype)
    entries = segment.size if segment.shards else 0

    def mark(a: Array) -> PerDevice:
        # A row of scales goes with its row of values, to whichever owner.
        return PerDevice(a, rows, entries=entries if a.shape[-1] == block else -(-entries // block) * a.shape[-1])

    return jax.tree.map(mark, _compat.varying(zeros, axis_name))


def init_server(group: Group, segments: list[Segment], workers: int, axis_name: AxisName | None) -> Any:
    """Returns what owners hold of a group before the first step; ``()`` where they hold nothing."""
    least = group.collective.owners_from(group.compressor, group.memory)
    if not segments or least is None:
        return ()
    rows = tuple(group.rows(s) for s in segments)
    returns = Return(least, rows, group.dealt, -1 if group.memory.counts_sent else 1) if least > 1 else None
    mark = PerDevice(jnp.zeros(()), sum(rows), "shard", returns=returns)
    zeros = jnp.zeros((mark.held(workers), group.compressor.block), jnp.float32)
    kept = _compat.varying(narrow.zeros(zeros, group.memory.dtype), axis_name)
    return jax.tree.map(lambda a: dataclasses.replace(mark, value=a), kept)


def refuse_other_layout(layout: Layout, memories: tuple) -> None:
    """Refuses memories of other tensors than the gradient's.

    Raises:
        ValueError: if groups, segments, rows or dtypes differ.
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
    for (group, _), of in zip(layout.groups, memories, strict=True):
        wanted = kernels.narrow_dtype(group.memory.dtype, group.compressor.block)
        found = {str(narrow.values_of(leaf).dtype) for leaf in jax.tree.leaves(_values(of), is_leaf=narrow.is_narrow)}
        if found - {wanted}:
            raise ValueError(
                f"the exchange's memories are {', '.join(sorted(found))} in this state, and it keeps {wanted}: initialise it"
                " with the same dtype"
            )


def _values(tree: Any) -> Any:
    return jax.tree.map(lambda p: p.value, tree, is_leaf=is_per_device)


def refuse_shared(state: Any, axis_name: AxisName | None, workers: int) -> None:
    """Refuses per-device state that all workers were given as one, where that is tracked.

    Raises:
        ValueError: if there are several workers, and a value does not vary over them.
    """
    if workers == 1 or not _compat.tracks_varying(axis_name):
        return
    for node in nodes_of(state, is_per_device):
        if node.kind != "replica" and not _compat.is_varying(node.value, axis_name):
            raise ValueError(
                f"the exchange's state is declared replicated over {axis_name!r}, and each worker has its own: give shard_map"
                f" gradcomp_jax.state_specs(state, axis_name={axis_name!r}) for it, not P(), in in_specs and out_specs"
                " (gradcomp_jax.init_opt_state returns state and specs)"
            )
