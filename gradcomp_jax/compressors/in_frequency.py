"""A selection of frequencies: another compressor over the cosine transform of each block."""

import dataclasses
from typing import Any

from gradcomp_jax import kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.compressors.base import LARGEST, Compressor


@dataclasses.dataclass(frozen=True)
class InFrequency(Compressor):
    """See :func:`in_frequency`."""

    inner: Compressor

    @property
    def block(self) -> int:
        """As the inner compressor's."""
        return self.inner.block

    @property
    def fills(self) -> bool:
        """A frequency reaches into the padding."""
        return True

    def encode(
        self,
        rows: Array,
        state: PyTree,
        key: Array,
        *,
        count: Array,
        local: Array | None = None,
        shared: Array | None = None,
    ) -> tuple[Any, PyTree]:
        """Transforms, then encodes."""
        return self.inner.encode(kernels.dct(rows), state, key, count=count, local=local, shared=shared)

    def finite(self, payload: Any, local: Array | None, largest: float = LARGEST) -> Array:
        """As of the inner code, of a block's share: a block's entries may meet in one frequency, and one in many."""
        return self.inner.finite(payload, local, largest / self.block)

    def decode(self, payload: Any, *, shared: Array | None = None) -> Array:
        """Decodes, then transforms back."""
        return kernels.inverse_dct(self.inner.decode(payload, shared=shared))

    def reduce(self, payloads: Any, *, shared: Array | None = None) -> Array:
        """Adds frequencies, and transforms back once."""
        return kernels.inverse_dct(self.inner.reduce(payloads, shared=shared))

    def back(self, workers: int) -> Compressor:
        """The inner compressor's, over frequencies again."""
        return InFrequency(self.inner.back(workers))


def in_frequency(inner: Compressor) -> InFrequency:
    """Encodes the orthonormal cosine transform (DCT-II) of every block, and decodes to entries.

    A block of more than 128 entries is taken for a two-dimensional chunk as nearly square as it can be.

    Args:
        inner: encodes the frequencies, such as ``topk``; needs no statistic of its own.

    Raises:
        ValueError: for a compressor that needs seeds or a statistic that the workers agree on.

    References:
        Peng et al., 2024, DeMo, https://arxiv.org/abs/2411.19870, section 3.
    """
    if inner.seeded or inner.agrees:
        raise ValueError(
            f"in_frequency cannot hold {type(inner).__name__}, whose workers share a statistic or seeds; use topk"
        )
    return InFrequency(inner)
