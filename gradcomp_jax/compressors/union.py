"""The exact mean of several selections: as entries, or as whole rows where those are fewer bytes."""

import dataclasses

import jax.numpy as jnp

from gradcomp_jax import _registered, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.compressors.base import Compressor, RowInfo, index_dtype


@_registered.node
@dataclasses.dataclass(frozen=True)
class UnionPayload:
    """Holds the entries of a mean, or whole rows.

    Attributes:
        index: unsigned ``[rows, k]``, or ``None`` where rows are whole.
        value: float32 ``[rows, k or block]``.
    """

    index: Array | None
    value: Array


@dataclasses.dataclass(frozen=True)
class Union(Compressor):
    """Sends every entry that is not zero, in float32, of rows with at most ``k`` such entries.

    The sum of N selections of k' entries has at most N k' of them. If their indices and values cost more than the
    whole row does, the row is sent whole: SparCML's switch to dense (Renggli et al., 2019,
    https://arxiv.org/abs/1802.08021, section 5.1), decided from shapes.
    """

    k: int
    lossless = True  # of such rows

    @property
    def whole(self) -> bool:
        """Returns whether rows are sent whole."""
        width = jnp.dtype(index_dtype(self.block)).itemsize
        return self.k * (width + 4) >= self.block * 4

    def encode(self, rows: Array, state: PyTree, info: RowInfo) -> tuple[UnionPayload, PyTree]:
        """Finds the entries that are not zero."""
        if self.whole:
            return UnionPayload(None, rows), state
        index, value = kernels.nonzero_of_rows(rows, self.k)
        return UnionPayload(index.astype(index_dtype(self.block)), value), state

    def decode(self, payload: UnionPayload, info: RowInfo = RowInfo()) -> Array:
        """Returns the values at their positions."""
        if payload.index is None:
            return payload.value
        return kernels.place_in_rows(payload.index, payload.value, self.block)
