"""How a tensor is divided among devices."""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a tensor is divided among a worker's devices.

    Attributes:
        devices: how many there are.
        dim: the dimension that the user's sharding divides; ``None`` cuts the entries in their order: the first dimension
            where it divides, else as many leading ones joined as it takes, so that a share of a matrix is a matrix. Where all
            but the last do not divide, zeros are at the end of the last shares.
    """

    devices: int
    dim: int | None = None

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of one share of a tensor."""
        if self.dim is not None:
            return (*shape[: self.dim], shape[self.dim] // self.devices, *shape[self.dim + 1 :])
        if len(shape) < 2:
            return (-(-math.prod(shape) // self.devices),)
        joined = [math.prod(shape[:k]) for k in range(1, len(shape))]
        k = next((k for k, rows in enumerate(joined, 1) if rows % self.devices == 0), len(joined))
        return -(-joined[k - 1] // self.devices), *shape[k:]

    def stack(self, x: Array) -> Array:
        """All shares of a tensor: ``[devices, ...]``."""
        share = self.shape(x.shape)
        if self.dim is not None:
            split = x.reshape(*x.shape[: self.dim], self.devices, *share[self.dim :])
            return jnp.moveaxis(split, self.dim, 0)
        flat = x.reshape(-1)
        return jnp.pad(flat, (0, self.devices * math.prod(share) - flat.size)).reshape(self.devices, *share)

    def flat(self, x: Array) -> Array:
        """All shares of a tensor, each flat, its divided dimension outermost: ``[devices, entries]``.

        Put end to end they are the same numbers in the same order whatever the number of devices.
        """
        return jnp.moveaxis(x, self.dim or 0, 0).reshape(self.devices, -1)

    def unflat(self, share: Array, shape: tuple[int, ...]) -> Array:
        """One share of a tensor of a shape, from the entries that :meth:`flat` has of it."""
        first, *rest = (self.shape(shape)[self.dim or 0], *shape[: self.dim or 0], *shape[(self.dim or 0) + 1 :])
        return jnp.moveaxis(share.reshape(first, *rest), 0, self.dim or 0)

    def own(self, x: Array, index: Array) -> Array:
        """This device's share of a tensor that it has whole, or the shard that it has."""
        return x if self.dim is not None else lax.dynamic_index_in_dim(self.stack(x), index, keepdims=False)

    def check(self, path: str, shape: tuple[int, ...]) -> None:
        """Refuses a dimension that does not divide.

        Raises:
            ValueError: naming the tensor.
        """
        if self.dim is not None and shape[self.dim] % self.devices:
            raise ValueError(
                f"dimension {self.dim} of {path!r}, of shape {shape}, does not divide among {self.devices} devices;"
                " leave it whole in param_specs"
            )
