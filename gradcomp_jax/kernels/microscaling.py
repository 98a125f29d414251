"""Rows of few bits with a scale of 8 bits for each block, bit for bit as matrix units read them: MXFP8, MXFP4 and NVFP4.

Rouhani et al., 2023, OCP Microscaling Formats (MX) Specification v1.0,
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf; NVIDIA, 2025, Introducing NVFP4,
https://developer.nvidia.com/blog/introducing-nvfp4-for-efficient-and-accurate-low-precision-inference.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax

from gradcomp_jax import _checks
from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.float4 import from_e2m1, to_e2m1
from gradcomp_jax.kernels.float8 import from_float8, to_float8
from gradcomp_jax.kernels.reductions import largest_of_rows
from gradcomp_jax.kernels.rows import spread

Microscaling = Literal["mxfp8", "mxfp4", "nvfp4"]


class _Format(NamedTuple):
    """``bits`` of an element, entries of a ``block``, and the exponent of the element's largest number."""

    bits: int
    block: int
    exponent: int


FORMATS: dict[Microscaling, _Format] = {
    "mxfp8": _Format(8, 32, 8),
    "mxfp4": _Format(4, 32, 2),
    "nvfp4": _Format(4, 16, 2),
}

_TINY = float(jnp.finfo(jnp.float32).tiny)


class Microscaled(NamedTuple):
    """Holds rows of elements and their scales.

    Attributes:
        words: uint8 ``[rows, n * bits / 8]``: bits of ``float8_e4m3fn`` or, two to a byte with the first in the low half, of
            ``float4_e2m1fn``.
        scale: uint8 ``[rows, n / block]``: bits of ``float8_e8m0fnu`` (MX) or ``float8_e4m3fn`` (NVFP4).
        row_scale: float32 ``[rows, 1]`` of NVFP4, else ``None``.
    """

    words: Array
    scale: Array
    row_scale: Array | None = None


def largest_of_blocks(rows: Array, format: Microscaling) -> Array:
    """Returns the largest magnitude of each block: float32 ``[rows, n]`` to ``[rows, n / block]``; NaN where it has one.

    Raises:
        ValueError: for an unknown format, and for rows that are not whole blocks.
    """
    n, width = rows.shape
    block = FORMATS[_checks.one_of("format", format, FORMATS)].block
    if width % block:
        raise ValueError(f"rows of {format} are whole blocks of {block} entries, got {width}: pad them with zeros")
    # One reduction of short runs, which CPU vectorises and holds: anything else it would compute again for each entry. A NaN is
    # above all numbers as an integer.
    bits = lax.bitcast_convert_type(rows, jnp.int32) & jnp.int32(0x7FFFFFFF)
    return lax.bitcast_convert_type(jnp.max(bits.reshape(n, width // block, block), axis=2), jnp.float32)


def to_microscaled(rows: Array, format: Microscaling, largest: Array | None = None) -> Microscaled:
    """Rounds each block's entries to the format's numbers times its scale, ties to even; what is too large saturates.

    MX: the scale is the power of two below the block's largest magnitude, over the one below the element's largest number.
    NVFP4: the scale is a sixth of the block's largest in units of ``row_scale``, which is the row's largest over 6 * 448.

    A block whose scale is no normal float32 decodes to zeros, and so does one of NVFP4 whose scale rounds to 0: below 2**-118
    (MXFP8), 2**-124 (MXFP4), or about 2**-19 of the row's largest. A NaN or an infinity becomes a NaN of its scale.

    Args:
        rows: float32 ``[rows, n]``; n is whole blocks.
        format: ``mxfp8``, ``mxfp4`` or ``nvfp4``.
        largest: what :func:`largest_of_blocks` returns, where it is known.

    Raises:
        ValueError: for an unknown format, and for rows that are not whole blocks.
    """
    largest = largest_of_blocks(rows, format) if largest is None else largest
    row_scale = None
    if format == "nvfp4":
        top = largest_of_rows(largest)[:, None] * jnp.float32(1 / (6 * 448))
        scale = to_float8(largest * jnp.float32(1 / 6) / _divisor(top), "e4m3")[0]
        row_scale = jnp.where(top < _TINY, 0.0, top)
        unit = from_float8(scale, "e4m3") * row_scale
    else:
        scale = _to_e8m0(largest, FORMATS[format].exponent)
        unit = _from_e8m0(scale)
    scaled = rows / spread(_divisor(unit), rows.shape)
    if FORMATS[format].bits == 8:
        return Microscaled(to_float8(scaled, "e4m3")[0], scale)
    return Microscaled(_paired(to_e2m1(scaled)), scale, row_scale)


def from_microscaled(coded: Microscaled, format: Microscaling) -> Array:
    """Inverts :func:`to_microscaled` up to rounding: float32 ``[rows, n]``."""
    wide = FORMATS[format].bits == 8
    elements = from_float8(coded.words, "e4m3") if wide else from_e2m1(_unpaired(coded.words))
    scale = spread(scales_of(coded.scale, format), elements.shape)
    return elements * scale if coded.row_scale is None else elements * scale * coded.row_scale


def scales_of(scale: Array, format: Microscaling) -> Array:
    """Returns the numbers that the bytes of scales stand for, float32 of the same shape."""
    return from_float8(scale, "e4m3") if format == "nvfp4" else _from_e8m0(scale)


def _divisor(scale: Array) -> Array:
    """Returns scales to divide by: of what is too small zeros remain. A NaN stays, and shows in what is divided."""
    return jnp.where(scale < _TINY, jnp.inf, scale)


def _to_e8m0(largest: Array, exponent: int) -> Array:
    """Returns the exponents of magnitudes, less that of the element's largest number, as bytes; not finite ones are 255."""
    own = lax.bitcast_convert_type(largest, jnp.int32) >> 23
    return jnp.where(own == 255, 255, jnp.maximum(own - exponent, 0)).astype(jnp.uint8)


def _from_e8m0(scale: Array) -> Array:
    """Returns powers of two; 0 is 2**-127, which is subnormal, and 255 a NaN."""
    code = scale.astype(jnp.int32)
    return lax.bitcast_convert_type((code << 23) | jnp.where((code == 0) | (code == 255), 1 << 22, 0), jnp.float32)


def _paired(codes: Array) -> Array:
    """Packs neighbours into a byte, the first into its low half, as JAX and ml_dtypes lay out four bits."""
    return (codes[:, ::2] | (codes[:, 1::2] << 4)).astype(jnp.uint8)


def _unpaired(words: Array) -> Array:
    """Inverts :func:`_paired`: int32 in [0, 16), in rows of twice the width."""
    twice = jnp.repeat(words, 2, axis=1).astype(jnp.int32)
    is_second = lax.broadcasted_iota(jnp.int32, twice.shape, 1) & 1
    return (twice >> (4 * is_second)) & 15
