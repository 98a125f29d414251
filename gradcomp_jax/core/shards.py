"""Shards: parts of a tensor, one for each of some devices."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array


@dataclasses.dataclass(frozen=True)
class Shards:
    """Describes the shards of a tensor, one for each of some devices.

    Attributes:
        count: number of shards.
        dim: the dimension that the user's sharding divides. ``None`` cuts the entries in their order: the first dimension
            where ``count`` divides it, else as many leading dimensions joined as that takes, so that a shard of a matrix is a
            matrix. Where ``count`` divides no such join, the last shards end with zeros.
        axes: the axes of these devices, where they are not all axes within a worker.
    """

    count: int
    dim: int | None = None
    axes: Any = None

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of one shard of a tensor."""
        if self.dim is not None:
            return (*shape[: self.dim], shape[self.dim] // self.count, *shape[self.dim + 1 :])
        if len(shape) < 2:
            return (-(-math.prod(shape) // self.count),)
        joined = [math.prod(shape[:k]) for k in range(1, len(shape))]
        k = next((k for k, rows in enumerate(joined, 1) if rows % self.count == 0), len(joined))
        return -(-joined[k - 1] // self.count), *shape[k:]

    def stack(self, x: Array) -> Array:
        """Returns all shards of a tensor: ``[count, ...]``."""
        shard = self.shape(x.shape)
        if self.dim is not None:
            split = x.reshape(*x.shape[: self.dim], self.count, *shard[self.dim :])
            return jnp.moveaxis(split, self.dim, 0)
        flat = x.reshape(-1)
        return jnp.pad(flat, (0, self.count * math.prod(shard) - flat.size)).reshape(self.count, *shard)

    def flat(self, x: Array) -> Array:
        """Returns all shards of a tensor, each flat, its divided dimension outermost: ``[count, entries]``.

        End to end they are the same numbers in the same order for every count.
        """
        return jnp.moveaxis(x, self.dim or 0, 0).reshape(self.count, -1)

    def unflat(self, shard: Array, shape: tuple[int, ...]) -> Array:
        """Returns one shard of a tensor of a shape, from its entries as :meth:`flat` orders them."""
        first, *rest = (self.shape(shape)[self.dim or 0], *shape[: self.dim or 0], *shape[(self.dim or 0) + 1 :])
        return jnp.moveaxis(shard.reshape(first, *rest), 0, self.dim or 0)

    def own(self, x: Array, index: Array) -> Array:
        """Returns this device's shard of a whole tensor, or ``x`` itself where it is a shard already."""
        return x if self.dim is not None else lax.dynamic_index_in_dim(self.stack(x), index, keepdims=False)

    def check(self, path: str, shape: tuple[int, ...]) -> None:
        """Refuses a dimension that does not divide.

        Raises:
            ValueError: naming the tensor.
        """
        if self.dim is not None and shape[self.dim] % self.count:
            raise ValueError(
                f"dimension {self.dim} of {path!r}, of shape {shape}, does not divide among {self.count} devices;"
                " leave it whole in param_specs"
            )
