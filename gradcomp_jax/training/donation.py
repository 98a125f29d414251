"""Buffers of a state that is donated: XLA ends the process where one is given away twice, or given away and read."""

import operator
import weakref
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax import _compat
from gradcomp_jax._typing import PyTree
from gradcomp_jax.training.refusals import refuse_donated
from gradcomp_jax.transforms.step_keys import is_typed_key

_IS_DELETED = operator.methodcaller("is_deleted")


class OwnBuffers:
    """Gives every array of a state buffers of its own, before a program takes them.

    What a step returned shares no buffers, so as long as all leaves of a state are those of the last step, in their order,
    nothing is compared. Any other state (a fresh one, a restored one, one of which a part was replaced) has its buffers
    compared.
    """

    def __init__(self) -> None:
        """Begins without a last step."""
        self._last: list[weakref.ref[jax.Array]] = []

    def of(self, state: PyTree, batch: PyTree = ()) -> PyTree:
        """Returns the state, with copies of arrays that share buffers with an earlier one of it, or with the batch.

        Tied weights come apart: each goes on from the same values.

        Raises:
            ValueError: if an earlier step has taken the memory of an array.
        """
        leaves, treedef = jax.tree.flatten(state)
        last = self._last
        known = len(leaves) == len(last) and all(ref() is leaf for ref, leaf in zip(last, leaves, strict=True))
        # In every step: what the last one returned is arrays, and need not be asked for its type.
        if not known or any(map(_IS_DELETED, leaves)):
            refuse_donated(state)
        refuse_donated(batch, called="batch")
        shared = set[int]() if known else _shared(leaves)
        shared |= _read_too(leaves, [leaf for leaf in jax.tree.leaves(batch) if _is_placed(leaf)])
        if not shared:
            return state
        return jax.tree.unflatten(treedef, [leaf.copy() if i in shared else leaf for i, leaf in enumerate(leaves)])

    def returned(self, state: PyTree) -> None:
        """Takes note of what a step has returned."""
        # Weak: a state that nobody needs any more is not kept.
        self._last = [weakref.ref(leaf) for leaf in jax.tree.leaves(state)]


def _shared(leaves: list[Any]) -> set[int]:
    """The places of arrays that share a buffer with one before them."""
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
    """The places of arrays of a state that share a buffer with one of a batch."""
    # In every step, so the cheap question comes first: whatever shares a buffer has a shard of its shape.
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
    """Of typed keys the shape of their data, and of what may be the data that of the keys."""
    if is_typed_key(array):
        return (jax.eval_shape(jax.random.key_data, array).shape,)
    return (array.shape[:-1],) if array.dtype == jnp.uint32 else ()


def _is_placed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not _compat.is_traced(leaf)


def _buffers(array: jax.Array) -> set[tuple[Any, int]]:
    """The device and the address of every buffer of this process; none where a platform does not tell."""
    shards, found = array.addressable_shards, set[tuple[Any, int]]()
    for shard in shards:
        try:
            found.add((shard.device, shard.data.unsafe_buffer_pointer()))
        except jax.errors.JaxRuntimeError:
            # Of an array whose other shards are its own still.
            refuse_donated(shard.data)
    return found
