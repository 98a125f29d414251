"""Block-scaled int8: a float32 scale for each block and a byte for each value."""

import dataclasses

import jax

from gradcomp_jax import _checks, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.compressors.base import Compressor
from gradcomp_jax.kernels.random import GENERATORS, Generator


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Payload:
    """``values``: int8 ``[rows, block]``; ``scale``: float32 ``[rows, 1]``. Decodes to their product."""

    values: Array
    scale: Array


@dataclasses.dataclass(frozen=True)
class BlockInt8(Compressor):
    """See :func:`block_int8`."""

    block_size: int
    stochastic: bool
    generator: Generator

    @property
    def block(self) -> int:
        """Entries that share a scale."""
        return self.block_size

    @property
    def unbiased(self) -> bool:
        """With stochastic rounding."""
        return self.stochastic

    def measure(self, rows: Array, count: Array) -> Array:
        """The largest magnitude of each row."""
        del count
        return kernels.largest_of_rows(rows)

    def encode(
        self,
        rows: Array,
        state: PyTree,
        key: Array,
        *,
        count: Array,
        local: Array | None = None,
        shared: Array | None = None,
    ) -> tuple[Int8Payload, PyTree]:
        """Scales each row by its largest magnitude and rounds."""
        del shared
        largest = self.measure(rows, count) if local is None else local
        values, scale = kernels.quantize_int8(
            rows, key if self.stochastic else None, largest=largest, generator=self.generator
        )
        return Int8Payload(values, scale), state

    def decode(self, payload: Int8Payload, *, shared: Array | None = None) -> Array:
        """Value times scale."""
        del shared
        return kernels.dequantize_int8(payload.values, payload.scale)


def block_int8(*, block: int = 256, stochastic: bool = False, generator: Generator = "hash") -> BlockInt8:
    r"""int8 with one float32 scale :math:`\max|g| / 127` for each block: 8.125 bits a value with the default block.

    Args:
        block: entries that share a scale.
        stochastic: unbiased rounding, for use without a residual; to the nearest value otherwise.
        generator: ``hash`` or ``threefry``.

    Raises:
        ValueError: for a block below 1.

    References:
        Alistarh et al., 2017, QSGD, https://arxiv.org/abs/1610.02132; Wang et al., 2023, ZeRO++, https://arxiv.org/abs/2306.10209.
    """
    _checks.positive_int("block", block)
    _checks.one_of("generator", generator, GENERATORS)
    return BlockInt8(block, stochastic, generator)
