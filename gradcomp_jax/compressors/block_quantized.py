"""Block-scaled integers of 8, 4 or 2 bits, or floats of 4 bits: a float32 scale for each block and packed values.

The formats of matrix units, which have other scales, are in ``microscaled.py``.
"""

import dataclasses
from typing import Literal, NamedTuple

from gradcomp_jax import _arguments, _checks, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.compressors.base import Compressor, RowInfo
from gradcomp_jax.compressors.microscaled import ROW, microscaled
from gradcomp_jax.kernels.microscaling import FORMATS as MICROSCALED
from gradcomp_jax.kernels.quantize import FORMATS, NORMS, Format, Norm, check_format
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
        return QuantizedPayload(words, scale), state

    def decode(self, payload: QuantizedPayload, info: RowInfo = RowInfo()) -> Array:
        """Multiplies every value by its scale."""
        return kernels.dequantize(payload.words, payload.scale, self.block, self.bits, self.format)


@_arguments.checked
def block_quantized(
    *,
    bits: int | None = None,
    block: int | None = None,
    stochastic: bool = False,
    norm: Norm = "max",
    format: Literal["int", "e3m0", "mxfp8", "mxfp4", "nvfp4"] = "int",
    generator: Generator = "hash",
) -> Compressor:
    r"""Sends integers of few bits with one float32 scale for each block: 8.125 bits a value with the defaults.

    The scale is :math:`\|g\| / L`; the values are integers in [-L, L] with :math:`L = 2^{bits-1} - 1`: 127, 7 or 1. With
    ``e3m0`` they are zero and plus or minus 1, 2, 4, ..., 64, and L is 64: a float of a sign and three bits of exponent.

    ``mxfp8``, ``mxfp4`` and ``nvfp4`` are what matrix units read: floats (E4M3; E2M1 in the other two) to the nearest, ties to
    even, and a scale of 8 bits for each block.

    ========= ============= ===== ======================================================================= ============
    format    elements      block scale                                                                   bits a value
    ========= ============= ===== ======================================================================= ============
    ``mxfp8`` float8_e4m3fn 32    float8_e8m0fnu, the power of two below the largest, over 2**8           8.25
    ``mxfp4`` float4_e2m1fn 32    float8_e8m0fnu, the power of two below the largest, over 2**2           4.25
    ``nvfp4`` float4_e2m1fn 16    float8_e4m3fn, a sixth of the largest, and float32 for each 256 entries 4.625
    ========= ============= ===== ======================================================================= ============

    Their payload has the layout of ``jax.nn.scaled_matmul`` and ``jax.nn.scaled_dot_general``: rows of 256 entries with blocks
    along the last dimension, two elements of 4 bits to a byte, the first in the low half, as ``jax.lax.bitcast_convert_type``
    reads them. The float32 of ``nvfp4`` is the largest magnitude over 6 * 448, as NVIDIA has it of a whole tensor. Here it is
    that of a row, because each row is encoded by itself: an owner of some rows does not know the others' largest. A product
    with a row is multiplied by it.

    Args:
        bits: 8, 4 or 2; the format's own, or 8. Two bits hold {-1, 0, 1}; :func:`~gradcomp_jax.compressors.ternary` packs that
            in 1.6.
        block: entries that share a scale; the format's own, or 256.
        stochastic: rounds stochastically (unbiased), for use without a residual; otherwise to the nearest value.
        norm: ``max``, the largest magnitude, or ``l2``, with which most values of a block are small integers or zero.
        format: ``int``, ``e3m0``, ``mxfp8``, ``mxfp4`` or ``nvfp4``. The last three have their own bits and block, ``e3m0`` 4
            bits.
        generator: ``hash`` or ``threefry``.

    Raises:
        ValueError: for an unknown width, norm or format, for a block below 1, and for what a format does not have.

    References:
        Alistarh et al., 2017, QSGD, https://arxiv.org/abs/1610.02132; Wang et al., 2023, ZeRO++,
        https://arxiv.org/abs/2306.10209; Douillard et al., 2025, Streaming DiLoCo, https://arxiv.org/abs/2501.18512 (e3m0);
        Rouhani et al., 2023, OCP Microscaling Formats (MX) Specification v1.0,
        https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf; NVIDIA, 2025, Introducing NVFP4,
        https://developer.nvidia.com/blog/introducing-nvfp4-for-efficient-and-accurate-low-precision-inference.
    """
    _checks.one_of("format", format, (*FORMATS, *MICROSCALED))
    _checks.one_of("norm", norm, NORMS)
    _checks.one_of("generator", generator, GENERATORS)
    if format != "int" and format != "e3m0":
        return microscaled(format, bits=bits, block=block, stochastic=stochastic, norm=norm)
    bits = (8 if format == "int" else 4) if bits is None else bits
    _checks.one_of("bits", bits, kernels.WIDTHS)
    check_format(format, bits)
    block = ROW if block is None else _checks.positive_int("block", block)
    return BlockQuantized(block, bits, stochastic, norm, generator, format)
