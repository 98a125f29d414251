"""DRIVE and EDEN: a random rotation makes any block look Gaussian, and the best levels for a Gaussian are known.

Rotations differ by worker. With one rotation for all, the sum could be rotated back once; but equal gradients would have equal
errors, which do not average out. In two phases each owner rotates back N payloads of 1/N of the rows, as much work as for one
gradient.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from gradcomp_jax import _arguments, _checks, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.compressors.base import LARGEST, Compressor, RowInfo

_FURTHER = (2**31 - 1, 2**31 - 3)  # no worker has these numbers
_LEAST = 32  # the shortest block for which three rotations are near enough to a uniformly random one
_LONG = 256  # the shortest block for which two are


class RotatedPayload(NamedTuple):
    """Holds rotated rows.

    Attributes:
        words: packed level numbers, see :func:`~gradcomp_jax.kernels.encode_normal`.
        scale: float32 ``[rows, 1]``.
    """

    words: Array
    scale: Array


@dataclasses.dataclass(frozen=True)
class Rotated(Compressor):
    """Implements :func:`rotated`."""

    bits: int
    corrected: bool
    side_information = "worker_seeds"
    measures_largest = True  # in units of the largest no square over- or underflows
    pads_nonzero = True  # a rotation mixes entries into the padding
    multiplies = True
    scales = True

    @property
    def unbiased(self) -> bool:
        """Returns whether the scale is the unbiased one: unbiased over random rotations, to a thousandth of a block's norm."""
        return self.corrected

    def encode(self, rows: Array, state: PyTree, info: RowInfo) -> tuple[RotatedPayload, PyTree]:
        """Rotates, rounds to the nearest level, and finds the scale."""
        largest = self.statistic_of(rows, info)[:, None]
        # A NaN is not below the bound and stays in the scale, where it is detected.
        usable = ~(largest < jnp.finfo(jnp.float32).tiny)
        turned = jnp.where(usable, rows / jnp.where(usable, largest, 1.0), 0.0)
        for seeds in self._seeds(info):
            turned = kernels.rotate(turned, seeds, planes=self.corrected)
        square = kernels.sum_of_rows(turned * turned)[:, None]
        words = kernels.encode_normal(turned / jnp.where(usable, jnp.sqrt(square / self.block), 1.0), self.bits)
        levels = kernels.decode_normal(words, self.block, self.bits)
        along = kernels.sum_of_rows(turned * levels)[:, None]
        scale = square / along if self.corrected else along / kernels.sum_of_rows(levels * levels)[:, None]
        return RotatedPayload(words, jnp.where(usable, scale * largest, 0.0)), state

    def finite(self, payload: RotatedPayload, statistic: Any, largest: float = LARGEST) -> Array:
        """Checks entries against the limit divided by the block: the rotation may add up all entries of a block in one."""
        return super().finite(payload, statistic, largest / self.block)

    def _seeds(self, info: RowInfo) -> tuple[Array, ...]:
        """Returns a seed for each rotation. An unbiased scale needs two or three, which make any block look Gaussian."""
        seeds, further = info.need("side"), 0 if not self.corrected else 1 if self.block >= _LONG else 2
        return seeds, *(kernels.fold_seeds(seeds, number) for number in _FURTHER[:further])

    def decode(self, payload: RotatedPayload, info: RowInfo = RowInfo()) -> Array:
        """Rotates levels back and multiplies them by their scale."""
        # Accelerators rotate in bfloat16. What rounding does to any other numbers averages out; of levels there are few.
        factor = kernels.factor_for_bfloat16(self.bits)
        rows = kernels.decode_normal(payload.words, self.block, self.bits) * jnp.float32(factor)
        for seeds in reversed(self._seeds(info)):
            rows = kernels.rotate_back(rows, seeds, planes=self.corrected)
        return rows * (payload.scale / jnp.float32(factor))


@_arguments.checked
def rotated(bits: int = 4, *, block: int = 1024, unbiased: bool = True) -> Rotated:
    r"""Sends 1 to 4 bits a value: a random rotation, the best levels for a Gaussian, a float32 scale for each block.

    :math:`R` is a randomized Hadamard rotation, :math:`y = R x`, :math:`q = Q(y / \sigma_y)` the nearest Lloyd-Max levels,
    and :math:`\hat x = S R^{-1} q` with :math:`S = \|x\|^2 / \langle y, q \rangle` (unbiased) or
    :math:`S = \langle y, q \rangle / \|q\|^2` (the least square error, for use with a residual).

    The first scale is unbiased over uniformly random rotations. A randomized Hadamard rotation is far from uniform where two
    or three entries dominate a block: at 1 bit such a block decodes to its largest entry in every draw. After a second
    rotation, small entries beside a large one still decode to several times their value, because random signs leave all entries
    on a grid. So the unbiased code rotates twice (three times below a block of 256), and turns pairs of entries by random
    angles before each transform. The remaining bias is below a thousandth of the block's norm in every entry, for blocks of
    32 or more; shorter ones are refused. With a residual one rotation, by signs, is enough.

    Seeds follow from step, tensor and worker, and are not sent. One bit is DRIVE, more bits are EDEN. Bits on the wire: 1, 2,
    3.2 (ten values in 32 bits) or 4, and 32 / block.

    Args:
        bits: 1, 2, 3 or 4.
        block: entries that are rotated together, a power of two.
        unbiased: which scale.

    Raises:
        ValueError: for an unknown width, for a block that is not a power of two, and for an unbiased code of a block below 32.

    References:
        Vargaftik et al., 2021, DRIVE, https://arxiv.org/abs/2105.08339, sections 3 and 4; Vargaftik et al., 2022, EDEN,
        https://arxiv.org/abs/2108.08842, section 3.
    """
    _checks.one_of("bits", bits, (1, 2, 3, 4))
    if _checks.positive_int("block", block) & (block - 1):
        raise ValueError(f"block must be a power of two for a Hadamard rotation, got {block}")
    if unbiased and block < _LEAST:
        raise ValueError(
            f"rotations of a block of {block} are too few for an unbiased code: use block={_LEAST} or more, or unbiased=False"
            " (error_feedback=True of gradcomp_jax.eden), with a residual"
        )
    return Rotated(block, bits, unbiased)
