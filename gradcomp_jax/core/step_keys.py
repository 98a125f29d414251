"""Random keys that no two workers, tensors or steps share."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradcomp_jax import _compat
from gradcomp_jax._checks import typed_key
from gradcomp_jax._typing import Array, AxisName

_LAST = 2**31 - 1


class StepKeys(NamedTuple):
    """Makes the random keys of one step.

    Attributes:
        own: this worker's key.
        common: the key that is the same on every worker.
        step: int32 scalar. Skipped exchanges count, so every worker agrees on it and random streams continue.
    """

    own: Array
    common: Array
    step: Array

    @classmethod
    def of(cls, key: Any, step: Array, worker: Array, inner_axis_name: AxisName | None) -> "StepKeys":
        """Makes keys from a seed or a key. Devices of one worker get different keys, because they have different shards."""
        base = typed_key("key", key)
        if inner_axis_name is not None:
            base = jax.random.fold_in(base, _compat.axis_index(inner_axis_name))
        # The last number belongs to no worker and no leaf.
        return cls(jax.random.fold_in(base, worker), jax.random.fold_in(base, _LAST), step)

    def of_leaf(self, stream: Array, number: Array | int) -> Array:
        """Folds in the leaf, then the step; the worker is in the stream. So no two leaves, steps or workers share a key."""
        return jax.random.fold_in(jax.random.fold_in(stream, number), self.step)

    def of_leaves(self, stream: Array, numbers: Sequence[int]) -> list[Array]:
        """Returns :meth:`of_leaf` of each number, all folded together: the compiler sees one generator, not hundreds."""
        if jax.random.key_impl(stream) not in ("threefry2x32", "rbg"):
            # Other generators may draw different keys where they draw several together (unsafe_rbg does).
            return [self.of_leaf(stream, number) for number in numbers]
        folded = jax.vmap(lambda number: self.of_leaf(stream, number))(jnp.asarray(numbers, jnp.uint32))
        return [jax.lax.index_in_dim(folded, i, keepdims=False) for i in range(len(numbers))]

    def of_downlink(self, number: int) -> Array:
        """Returns this worker's key for the downlink of message number ``number`` of the step."""
        # Counting down from the end gives a number that belongs to no leaf, so the downlink has its own stream.
        return self.of_leaf(self.own, _LAST - number)
