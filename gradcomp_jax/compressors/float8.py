"""Floating point of eight bits, as bytes on the wire."""

import dataclasses
from typing import Literal, NamedTuple, get_args

from gradcomp_jax import _arguments, _checks, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.compressors.base import Compressor, RowInfo

Format = Literal["e4m3", "e5m2"]


class Float8Payload(NamedTuple):
    """Holds rows in eight bits.

    Attributes:
        words: uint8 ``[rows, block]``.
        scale: float32 ``[rows, 1]``, or ``None`` for plain casts.
    """

    words: Array
    scale: Array | None


@dataclasses.dataclass(frozen=True)
class Float8(Compressor):
    """Implements :func:`float8`."""

    format: Format
    scaled: bool
    measures_largest = True
    scales = True

    def encode(self, rows: Array, state: PyTree, info: RowInfo) -> tuple[Float8Payload, PyTree]:
        """Casts to the nearest value of the format; beyond its range, to its largest number."""
        largest = self.statistic_of(rows, info) if self.scaled else None
        words, scale = kernels.to_float8(rows, self.format, largest=largest)
        return Float8Payload(words, scale), state

    def decode(self, payload: Float8Payload, info: RowInfo = RowInfo()) -> Array:
        """Casts back, times the scale."""
        return kernels.from_float8(payload.words, self.format, payload.scale)


@_arguments.checked
def float8(format: Format = "e4m3", *, block: int = 256, scaled: bool = True) -> Float8:
    """Casts to eight-bit floating point: e4m3 (3 bits of mantissa, up to 448) or e5m2 (2 bits, up to 57344).

    Scaled, the largest entry of each block becomes the format's largest number: 8.125 bits a value with the defaults. A plain
    cast has no scale, loses what is below the format's smallest number (2**-9 and 2**-16) and saturates above its largest.

    Args:
        format: ``e4m3`` or ``e5m2``.
        block: entries that share a scale.
        scaled: one float32 scale for each block.

    Raises:
        ValueError: for an unknown format, and for a block below 1.

    References:
        Micikevicius et al., 2022, FP8 Formats for Deep Learning, https://arxiv.org/abs/2209.05433, section 3.
    """
    _checks.one_of("format", format, get_args(Format))
    return Float8(_checks.positive_int("block", block), format, scaled)
