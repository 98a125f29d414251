"""Block-scaled numbers: one float32 scale for each row, and values rounded to a symmetric grid of 8, 4 or 2 bits; and signs."""

from typing import Literal

import jax.numpy as jnp
from jax import lax

from gradcomp_jax import _checks
from gradcomp_jax._typing import Array
from gradcomp_jax.kernels.float4 import from_e3m0, to_e3m0
from gradcomp_jax.kernels.packing import pack_bits, packed_length, plane_starts, unpack_bits
from gradcomp_jax.kernels.random import Generator, rounded, uniform, uniform_planes
from gradcomp_jax.kernels.reductions import largest_of_rows, norm_of_rows

WIDTHS = (8, 4, 2)
"""Bits of a value that :func:`quantize` takes."""

Norm = Literal["max", "l2"]
NORMS: tuple[Norm, ...] = ("max", "l2")

Format = Literal["int", "e3m0"]
FORMATS: tuple[Format, ...] = ("int", "e3m0")


def levels(bits: int, format: Format = "int") -> int:
    """Returns the largest number of a grid: 127, 7 or 1; 64 for e3m0. The grid has zero, and the negative of every number."""
    return 2 ** (bits - 1) - 1 if format == "int" else 64


def quantize(
    rows: Array,
    bits: int = 8,
    key: Array | None = None,
    *,
    norm: Norm = "max",
    format: Format = "int",
    largest: Array | None = None,
    generator: Generator = "hash",
) -> tuple[Array, Array]:
    """Quantizes each row relative to its own largest magnitude, or its L2 norm, and packs.

    Args:
        rows: float32 ``[rows, block]``. Padding of zeros does not change the scale.
        bits: 8, 4 or 2. Two bits hold {-1, 0, 1}, as base 3 does in 1.6.
        key: rounds stochastically (unbiased) with this key; without it, to the nearest value.
        norm: the value of the largest integer: ``max``, the row's largest magnitude, or ``l2``, its L2 norm, which no
            entry exceeds either. With ``l2`` and a key, most integers are small or zero.
        format: ``int``, or, with 4 bits, ``e3m0``: zero, and plus or minus 1, 2, 4, ..., 64.
        largest: float32 ``[rows]``, the rows' norms, of the kind that ``norm`` names, where they are known.
        generator: ``hash`` or ``threefry``.

    Returns:
        ``(words, scale)``: int8 ``[rows, block]`` (8 bits) or uint8 ``[rows, ceil(block * bits / 8)]``, planes as in
        :func:`~gradcomp_jax.kernels.packing.pack_digits`; float32 ``[rows, 1]``. A row of zeros has scale 0.

    Raises:
        ValueError: for an unknown width, norm or format, and for e3m0 with another width than 4.

    References:
        Alistarh et al., 2017, QSGD, https://arxiv.org/abs/1610.02132, section 3.1.
    """
    if bits not in WIDTHS:
        raise ValueError(f"bits must be 8, 4 or 2, got {bits}")
    _checks.one_of("norm", norm, NORMS)
    check_format(format, bits)
    n, block = rows.shape
    width = packed_length(block, 2**bits, 8)
    if n == 0:
        return jnp.zeros((0, width), jnp.int8 if bits == 8 else jnp.uint8), jnp.zeros((0, 1), jnp.float32)
    top = levels(bits, format)
    if largest is None:
        largest = largest_of_rows(rows) if norm == "max" else norm_of_rows(rows)
    scale = largest[:, None] * jnp.float32(1 / top)
    # Below the smallest normal float the quotient overflows or is flushed: such a row decodes to zeros, and a residual
    # keeps all of it. A NaN is not below it and stays in the scale, where it is detected.
    usable = ~(scale < jnp.finfo(jnp.float32).tiny)
    divisor = jnp.where(usable, scale, 1.0)

    def code(part: Array, drawn: Array | None) -> Array:
        scaled = jnp.where(usable, part / divisor, 0.0)
        return to_e3m0(scaled, drawn) if format == "e3m0" else jnp.clip(rounded(scaled, drawn), -top, top)

    sent = jnp.where(usable, scale, 0.0)
    if bits == 8:
        drawn = None if key is None else uniform(key, rows.shape, generator)
        return code(rows, drawn).astype(jnp.int8), sent
    starts = plane_starts(block, 2**bits, 8)
    draws = _plane_draws(key, rows, starts, width, generator)
    total = jnp.zeros((n, width), jnp.int32)
    for place, (start, drawn) in enumerate(zip(starts, draws, strict=True)):
        part = lax.slice_in_dim(rows, start, start + width, axis=1)
        digit = code(part, drawn).astype(jnp.int32) + (top if format == "int" else 0)
        total = total | (digit << (bits * place))
    return total.astype(jnp.uint8), sent


def _plane_draws(
    key: Array | None, rows: Array, starts: list[int], width: int, generator: Generator
) -> list[Array | None]:
    """Returns uniform numbers for each plane, or ``None``; one hash serves two planes."""
    if key is None:
        return [None] * len(starts)
    n, block = rows.shape
    if generator == "threefry":
        whole = uniform(key, rows.shape, generator)
        return [lax.slice_in_dim(whole, start, start + width, axis=1) for start in starts]
    return list(uniform_planes(key, n, block, starts, width))


def dequantize(words: Array, scale: Array, block: int, bits: int = 8, format: Format = "int") -> Array:
    """Inverts :func:`quantize` up to rounding: float32 ``[rows, block]``."""
    if bits == 8:
        return words.astype(jnp.float32) * scale
    digits = unpack_bits(words, block, bits).astype(jnp.int32)
    return (from_e3m0(digits) if format == "e3m0" else (digits - levels(bits)).astype(jnp.float32)) * scale


def check_format(format: Format, bits: int) -> None:
    """Raises ``ValueError`` for an unknown format, and for a format of another width."""
    _checks.one_of("format", format, FORMATS)
    if format == "e3m0" and bits != 4:
        raise ValueError(f"format='e3m0' is of 4 bits: pass bits=4, got {bits}")


def pack_signs(rows: Array) -> Array:
    """Packs the signs, bits set where negative: float32 ``[rows, block]`` to uint8 ``[rows, ceil(block / 8)]``.

    Zeros, of either sign, count as positive; the code decides what a zero decodes to.
    """
    return pack_bits(rows < 0, 1)


def unpack_signs(words: Array, block: int) -> Array:
    """Inverts :func:`pack_signs`: float32 ``[rows, block]`` of -1 and 1."""
    return 1.0 - 2.0 * unpack_bits(words, block, 1).astype(jnp.float32)
