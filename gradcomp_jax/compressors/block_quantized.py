"""Block-scaled integers of 8, 4 or 2 bits, or floats of 4 bits: a float32 scale for each block and packed values."""

import dataclasses
from typing import NamedTuple

from gradcomp_jax import _arguments, _checks, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.compressors.base import Compressor, RowInfo
from gradcomp_jax.kernels.quantize import NORMS, Format, Norm, check_format
from gradcomp_jax.kernels.random import GENERATORS, Generator


class QuantizedPayload(NamedTuple):
    """Holds quantized rows, which decode to values times scale.

    Attributes:
        words: int8 ``[rows, block]`` or packed uint8.
        scale: float32 ``[rows, 1]``.
    """

    words: Array
    scale: Array


@dataclasses.dataclass(frozen=True)
class BlockQuantized(Compressor):
    """Implements :func:`block_quantized`."""

    bits: int
    stochastic: bool
    norm: Norm
    generator: Generator
    format: Format = "int"
    scales = True

    @property
    def unbiased(self) -> bool:
        """Returns whether rounding is stochastic."""
        return self.stochastic

    @property
    def by_row(self) -> bool:  # type: ignore[override]
        """Returns whether nothing is drawn."""
        return not self.stochastic

    def statistic(self, rows: Array, info: RowInfo, state: PyTree = ()) -> Array:
        """Returns the norm of each row."""
        return kernels.largest_of_rows(rows) if self.norm == "max" else kernels.norm_of_rows(rows)

    def encode(self, rows: Array, state: PyTree, info: RowInfo) -> tuple[QuantizedPayload, PyTree]:
        """Scales each row by its norm and rounds."""
        key, norm = info.need("key") if self.stochastic else None, self.statistic_of(rows, info)
        words, scale = kernels.quantize(
            rows, self.bits, key, largest=norm, format=self.format, generator=self.generator
        )
        # TPU would write integers twice, for itself and, as words, for the others.
        words = kernels.from_words(kernels.held_on_tpu(kernels.to_words(words)), words.dtype)
        return QuantizedPayload(words, scale), state

    def decode(self, payload: QuantizedPayload, info: RowInfo = RowInfo()) -> Array:
        """Multiplies every value by its scale."""
        return kernels.dequantize(payload.words, payload.scale, self.block, self.bits, self.format)


@_arguments.checked
def block_quantized(
    *,
    bits: int = 8,
    block: int = 256,
    stochastic: bool = False,
    norm: Norm = "max",
    format: Format = "int",
    generator: Generator = "hash",
) -> BlockQuantized:
    r"""Sends integers of few bits with one float32 scale for each block: 8.125 bits a value with the defaults.

    The scale is :math:`\|g\| / L`; the values are integers in [-L, L] with :math:`L = 2^{bits-1} - 1`: 127, 7 or 1. With
    ``e3m0`` they are zero and plus or minus 1, 2, 4, ..., 64, and L is 64: a float of a sign and three bits of exponent.

    Args:
        bits: 8, 4 or 2. Two bits hold {-1, 0, 1}; :func:`~gradcomp_jax.compressors.ternary` packs that in 1.6.
        block: entries that share a scale.
        stochastic: rounds stochastically (unbiased), for use without a residual; otherwise to the nearest value.
        norm: ``max``, the largest magnitude, or ``l2``, with which most values of a block are small integers or zero.
        format: ``int``, or, with ``bits=4``, ``e3m0``.
        generator: ``hash`` or ``threefry``.

    Raises:
        ValueError: for an unknown width, norm or format, and for a block below 1.

    References:
        Alistarh et al., 2017, QSGD, https://arxiv.org/abs/1610.02132; Wang et al., 2023, ZeRO++,
        https://arxiv.org/abs/2306.10209; Douillard et al., 2025, Streaming DiLoCo, https://arxiv.org/abs/2501.18512 (e3m0).
    """
    _checks.one_of("bits", bits, kernels.WIDTHS)
    _checks.one_of("norm", norm, NORMS)
    _checks.one_of("generator", generator, GENERATORS)
    check_format(format, bits)
    return BlockQuantized(_checks.positive_int("block", block), bits, stochastic, norm, generator, format)
