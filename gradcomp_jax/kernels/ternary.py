"""TernGrad's ternarization: clip, scale, stochastic rounding to {-1, 0, 1}.

Wen et al., 2017, https://arxiv.org/abs/1705.07878, sections 3.1 to 3.3.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp_jax._typing import Array
from gradcomp_jax.kernels import rows as _rows
from gradcomp_jax.kernels.packing import pack_ternary, packed_length, plane_starts
from gradcomp_jax.kernels.random import Generator, uniform, uniform_of_planes, uniform_planes
from gradcomp_jax.kernels.reductions import largest, largest_of_rows

_EXPONENT = np.uint32(0x7F800000)  # the exponent bits of a float32
_FLAT = 1e-3  # a variance below this part of the mean square is a constant's rounding error
_SEEN = 1e33  # a magnitude from here on is not clipped away: the check for finite entries must see it
_SAFE = (1e-15, 1e15)  # magnitudes whose squares, summed, neither vanish nor overflow


def clip_bound(rows: Array, count: Array, *, clip: float | None, per_row: bool) -> Array:
    r"""Returns the largest magnitude after clipping, which is also the scale of an unshared ternary code.

    :math:`\min(\max|g|, c\,\sigma)`, with sigma the standard deviation of the valid entries.

    Where sigma is 0 (a constant, a single entry) nothing is clipped: clipping there would zero the tensor forever.
    For one bound, the tensor is read once, so its variance is a difference of sums. Below a thousandth of the mean square
    (sigma below 3% of the root mean square) it counts as constant, and outside magnitudes of 1e-15 to 1e15 nothing is
    clipped. With a bound for each row, nothing is clipped from 1e33 on.

    Args:
        rows: float32 ``[rows, block]``, zeros in the padding.
        count: int32 ``[rows]``, valid entries of each row.
        clip: c; ``None`` does not clip.
        per_row: one bound for each row, or one for the tensor.

    Returns:
        float32 ``[rows]`` (``per_row``) or ``[1]``.
    """
    if rows.shape[0] == 0:
        return jnp.zeros((0 if per_row else 1,), jnp.float32)
    if clip is None:
        return largest_of_rows(rows) if per_row else largest(rows)[None]
    return _row_bounds(rows, count, clip) if per_row else _tensor_bound(rows, count, clip)


def clip_bounds(rows: Sequence[Array], counts: Sequence[Array], *, clip: float) -> list[Array]:
    """Returns :func:`clip_bound` of several tensors, one for each, which GPUs find together.

    Args:
        rows: of each tensor, float32 ``[rows, block]``, zeros in the padding.
        counts: of each tensor, int32 ``[rows]``, valid entries of each row.
        clip: c.

    Returns:
        float32 ``[1]`` of each tensor.
    """

    def apart(*rows: Array) -> list[Array]:
        each = zip(rows, counts, strict=True)
        return [clip_bound(of, count, clip=clip, per_row=False) for of, count in each]

    def together(*rows: Array) -> list[Array]:
        return _bounds_together(rows, counts, clip)

    if not all(map(len, rows)):
        return apart(*rows)
    return list(lax.platform_dependent(*rows, cuda=together, rocm=together, default=apart))


def _bounds_together(rows: Sequence[Array], counts: Sequence[Array], clip: float) -> list[Array]:
    """Returns the bounds from sums of rows, a kernel for each tensor, and sums of those, few kernels for all."""
    partial = [_largest_and_sums_at_once(of, (1,)) for of in rows]
    found = _of_each([jnp.concatenate(of) for of in zip(*partial, strict=True)], [len(of) for of in rows])
    return jnp.split(_bound(*found, jnp.stack([_entries(count) for count in counts]), clip), len(rows))


def _of_each(partial: Sequence[Array], rows: Sequence[int]) -> tuple[Array, Array, Array]:
    """Returns the largest and the sums of tensors, ``[tensors]``, from those of their rows, one tensor after the other."""
    ends = np.cumsum(rows, dtype=np.int32)
    place = (ends - np.asarray(rows, np.int32))[:, None] + lax.broadcasted_iota(jnp.int32, (len(rows), max(rows)), 1)
    top, first, second = (jnp.where(place < ends[:, None], jnp.take(of, place, mode="clip"), 0.0) for of in partial)
    return jnp.max(top, axis=1), jnp.sum(first, axis=1), jnp.sum(second, axis=1)


def _tensor_bound(rows: Array, count: Array, clip: float) -> Array:
    """Returns one bound from maximum and sums. Zeros in the padding add nothing to the sums."""
    top, first, second = lax.platform_dependent(rows, tpu=_largest_and_sums_at_once, default=_largest_and_sums)
    return _bound(top, first, second, _entries(count), clip)[None]


def _entries(count: Array) -> Array:
    """Returns how many entries a tensor has, at least 1, in float32: an int32 could wrap."""
    return jnp.maximum(jnp.sum(count.astype(jnp.float32)), 1.0)


def _bound(top: Array, first: Array, second: Array, n: Array, clip: float) -> Array:
    """Returns the bound of ``n`` entries from their largest magnitude, their sum and that of their squares."""
    square = second / n
    variance = square - (first / n) ** 2
    varies = (variance > _FLAT * square) & (top > _SAFE[0]) & (top < _SAFE[1])
    sigma = jnp.sqrt(jnp.where(varies, variance, 1.0))
    return jnp.where(varies, jnp.minimum(top, clip * sigma), top)


def _largest_and_sums(rows: Array) -> tuple[Array, Array, Array]:
    """Returns the largest magnitude, the sum and the sum of squares of a tensor."""
    return largest(rows), jnp.sum(rows), jnp.sum(rows * rows)


def _largest_and_sums_at_once(rows: Array, axes: Sequence[int] = (0, 1)) -> tuple[Array, Array, Array]:
    """Returns the same by one reduction, of whole rows by default.

    XLA:TPU would read a tensor once for integers, and once more for floats; GPUs would run a kernel for each.
    """
    magnitude = lax.bitcast_convert_type(jnp.abs(rows), jnp.int32)

    def both(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        return jnp.maximum(a[0], b[0]), a[1] + b[1], a[2] + b[2]

    zeros = (jnp.int32(0), jnp.float32(0), jnp.float32(0))
    top, first, second = lax.reduce((magnitude, rows, rows * rows), zeros, both, axes)
    return lax.bitcast_convert_type(top, jnp.float32), first, second


def _row_bounds(rows: Array, count: Array, clip: float) -> Array:
    """Returns a bound for each row, from deviations around its first entry: a constant row's variance is then exactly 0.

    Around zero, the difference of the sums would leave a rounding error, which looks like a tiny sigma.
    """
    top = largest_of_rows(rows)
    # Units are the power of two of the largest entry, which divides exactly, so that no square over- or underflows.
    unit = lax.bitcast_convert_type(lax.bitcast_convert_type(top, jnp.uint32) & _EXPONENT, jnp.float32)
    unit = jnp.where(unit > 0, unit, 1.0)
    valid = _rows.valid_mask(count, rows.shape[1])
    away = jnp.where(valid, (rows - rows[:, :1]) / unit[:, None], 0.0)
    first, second = jnp.sum(away, axis=1), jnp.sum(away * away, axis=1)
    n = jnp.maximum(count.astype(jnp.float32), 1.0)
    sigma = jnp.sqrt(jnp.maximum(second / n - (first / n) ** 2, 0.0)) * unit
    return jnp.where((sigma > 0) & (top < _SEEN), jnp.minimum(top, clip * sigma), top)


def ternarize(rows: Array, bound: Array, scale: Array, key: Array, *, generator: Generator = "hash") -> Array:
    r"""Draws the stochastic ternary code :math:`t = sign(g)\,b`, :math:`b \sim Bernoulli(\min(|g|, bound) / scale)`.

    The expectation of ``scale * t`` is the clipped gradient, exactly up to the generator's 24 bits.

    Args:
        rows: float32 ``[rows, block]``.
        bound: float32 ``[rows]`` or ``[1]``: entries are clipped to it.
        scale: float32 ``[rows]`` or ``[1]``, at least ``bound``; 0 gives zeros.
        key: typed JAX key.
        generator: ``hash`` or ``threefry``.

    Returns:
        int8 ``[rows, block]`` in {-1, 0, 1}.
    """
    n, block = rows.shape
    if generator == "threefry":
        drawn = uniform(key, rows.shape, generator)
    else:
        drawn = uniform_of_planes(key, n, block, plane_starts(block, 3, 8), packed_length(block, 3, 8))
    taken = _taken(drawn, rows, bound[:, None], scale[:, None])
    return jnp.where(taken, jnp.sign(rows), 0.0).astype(jnp.int8)


def _taken(drawn: Array, rows: Array, bound: Array, scale: Array) -> Array:
    """Returns which entries are sent: each with probability clipped magnitude over scale.

    The draw is scaled, not the entry, because the reciprocal of a subnormal scale would overflow. A draw below 1
    times the scale rounds to a number below the scale, so an entry as large as the scale is always sent, and a zero never.
    """
    return drawn * scale < jnp.minimum(jnp.abs(rows), bound)


def ternarize_packed(rows: Array, bound: Array, scale: Array, key: Array, *, generator: Generator = "hash") -> Array:
    """Returns :func:`ternarize` and ``pack_ternary`` in one pass: the same values, without the int8 array in between.

    Each of a byte's five planes is a slice of the input, so the result is one expression that reads the gradient once.
    Two planes share a hash (:func:`~gradcomp_jax.kernels.random.uniform_planes`).

    Returns:
        uint8 ``[rows, ceil(block / 5)]``.
    """
    n, block = rows.shape
    if generator == "threefry":
        return pack_ternary(ternarize(rows, bound, scale, key, generator=generator))
    width = packed_length(block, 3, 8)
    starts = plane_starts(block, 3, 8)
    drawn = uniform_planes(key, n, block, starts, width)
    total = jnp.zeros((n, width), jnp.int32)
    for place, start in enumerate(starts):
        part = lax.slice_in_dim(rows, start, start + width, axis=1)
        digit = jnp.where(_taken(drawn[place], part, bound[:, None], scale[:, None]), jnp.where(part < 0, 0, 2), 1)
        total = total + digit.astype(jnp.int32) * jnp.int32(3**place)
    return total.astype(jnp.uint8)
