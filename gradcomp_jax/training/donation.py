"""Buffers of a donated state: XLA ends the process if one is donated twice, or donated and read."""

import operator
import weakref
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax import _compat
from gradcomp_jax._checks import is_typed_key
from gradcomp_jax._typing import PyTree
from gradcomp_jax.training.refusals import refuse_donated

_IS_DELETED = operator.methodcaller("is_deleted")


class OwnBuffers:
    """Gives every array of a state its own buffers, before a program takes them.

    What a step returned shares no buffers, so nothing is compared while all leaves of a state are those of the last step, in
    order. The buffers of any other state (a fresh one, a restored one, or one of which a part was replaced) are compared.
    """

    def __init__(self) -> None:
        """Starts without a last step."""
        self._last: list[weakref.ref[jax.Array]] = []

    def of(self, state: PyTree, batch: PyTree = ()) -> PyTree:
        """Returns the state, with copies of arrays that share buffers with an earlier array of it, or with the batch.

        Tied weights become separate: each continues from the same values.
        """
        leaves, treedef = jax.tree.flatten(state)
        last = self._last
        known = len(leaves) == len(last) and all(ref() is leaf for ref, leaf in zip(last, leaves, strict=True))
        # This runs in every step. The last step returned arrays only, so their types need no check.
        if not known or any(map(_IS_DELETED, leaves)):
            refuse_donated(state)
        refuse_donated(batch, called="batch")
        shared = set[int]() if known else _shared(leaves)
        shared |= _read_too(leaves, [leaf for leaf in jax.tree.leaves(batch) if _is_placed(leaf)])
        if not shared:
            return state
        return jax.tree.unflatten(treedef, [leaf.copy() if i in shared else leaf for i, leaf in enumerate(leaves)])

    def returned(self, state: PyTree) -> None:
        """Records what a step has returned."""
        # Weak references, so that a state that nobody needs any more is not kept.
        self._last = [weakref.ref(leaf) for leaf in jax.tree.leaves(state)]


def _shared(leaves: list[Any]) -> set[int]:
    """Returns the places of arrays that share a buffer with an earlier one."""
    seen, shared = set[tuple[Any, int]](), set[int]()
    for i, leaf in enumerate(leaves):
        if not _is_placed(leaf):
            continue
        buffers = _buffers(leaf)
        if buffers & seen:
            shared.add(i)
        seen |= buffers
    return shared


def _read_too(leaves: list[Any], batch: list[jax.Array]) -> set[int]:
    """Returns the places of a state's arrays that share a buffer with an array of a batch."""
    # This runs in every step, so the cheap test is first: arrays that share a buffer have shards of one shape.
    wanted = {shape for array in batch for shape in (array.shape, _shard(array), *_key_shapes(array))}
    alike = [i for i, leaf in enumerate(leaves) if getattr(leaf, "shape", None) in wanted and _is_placed(leaf)]
    shared = set[int]()
    for i in alike:
        leaf = leaves[i]
        near = [array for array in batch if _shard(array) == _shard(leaf) or is_typed_key(array) != is_typed_key(leaf)]
        if any(array is leaf or not _buffers(leaf).isdisjoint(_buffers(array)) for array in near):
            shared.add(i)
    return shared


def _shard(array: jax.Array) -> tuple[int, ...]:
    return array.sharding.shard_shape(array.shape)


def _key_shapes(array: jax.Array) -> tuple[tuple[int, ...], ...]:
    """Returns the shape of the data for typed keys, and the shape of the keys for what may be their data."""
    if is_typed_key(array):
        return (jax.eval_shape(jax.random.key_data, array).shape,)
    return (array.shape[:-1],) if array.dtype == jnp.uint32 else ()


def _is_placed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not _compat.is_traced(leaf)


def _buffers(array: jax.Array) -> set[tuple[Any, int]]:
    """Returns the device and the address of every buffer in this process; none if the platform does not say."""
    shards, found = array.addressable_shards, set[tuple[Any, int]]()
    for shard in shards:
        try:
            found.add((shard.device, shard.data.unsafe_buffer_pointer()))
        except jax.errors.JaxRuntimeError:
            # The array has lost this shard's memory, although other shards are still its own.
            refuse_donated(shard.data)
    return found
