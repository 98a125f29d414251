"""Limits: what is too large for an update's dtype, and what is too large to stay in a memory."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax import collectives as co
from gradcomp_jax import kernels
from gradcomp_jax._typing import Array
from gradcomp_jax.collectives import owners
from gradcomp_jax.compressors.base import largest_kept
from gradcomp_jax.memory import narrow
from gradcomp_jax.transforms.layout import Group, Segment


def carried(
    sent: Array,
    group: Group,
    segment: Segment,
    came: co.InboundMessage,
    span: co.Span,
    leaves: Sequence[jax.ShapeDtypeStruct],
    after: Any,
    workers: co.Workers,
) -> Array:
    """Returns what counts as sent, less the part of the mean that is beyond the updates' range, as the memory lies.

    Every worker has the same mean and takes all of that part back. Where only an owner has the mean, the owner takes it back N
    times. ``leaves`` have the updates' dtypes, such as float16; the mean waits for ``after``.
    """
    bound = _bound(group, segment, leaves)
    if bound is None:
        return sent
    mean = came.mean(span, group.laid(segment), (after, after, after))
    beyond = mean - jnp.clip(mean, -bound, bound)
    if segment.shards:
        owned = owners.Owners(segment.owners * beyond.shape[0], segment.owners, in_turn=False)
        beyond = owned.place(beyond * segment.owners, workers.index)
    if group.is_padded(segment):
        beyond = jnp.where(kernels.valid_mask(group.memory_counts(segment), group.compressor.block), beyond, 0.0)
    return sent - beyond


def _bound(group: Group, segment: Segment, leaves: Sequence[jax.ShapeDtypeStruct]) -> Array | float | None:
    """Returns the largest magnitude that each entry of an update can have; ``None`` for leaves with float32's range."""
    of_leaf = {i: kernels.range_of(leaves[i].dtype) for i in segment.leaves}
    first, *others = of_leaf.values()
    if all(other == first for other in others):
        return first
    return group.join(segment, {i: jnp.full(leaves[i].shape, m or kernels.LARGEST) for i, m in of_leaf.items()})


def held(group: Group, before: Any, workers: co.Workers) -> Any:
    """Returns a memory as a skipped step leaves it: without entries so large that every later step would be skipped.

    Entries that are not finite, in a state from elsewhere, are removed too. The pass that writes the memory does this; there is
    no other. Estimates stay unchanged, because they must still add up to what all workers have been sent.
    """
    if group.memory.counts_sent:
        return before
    most = largest_kept(workers.count, group.compressor.block)

    def bounded(node: Any) -> Any:
        fits = jnp.abs(narrow.opened(node)) <= most
        if narrow.is_narrow(node):
            # Where a scale is not finite, a zero would not decode to zero.
            scale = jnp.where(jnp.abs(node.scale) <= most, node.scale, 0.0)
            return narrow.Narrow(scale, kernels.chosen(fits, node.values, jnp.zeros((), node.values.dtype)))
        return kernels.chosen(fits, node, jnp.zeros((), node.dtype))

    return jax.tree.map(bounded, before, is_leaf=narrow.is_narrow)
