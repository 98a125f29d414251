"""TernGrad's code: a scale and values in {-1, 0, 1}, five to a byte; and its exact downlink.

Wen et al., 2017, TernGrad, https://arxiv.org/abs/1705.07878.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp

from gradcomp_jax import _arguments, _checks, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.compressors.base import Compressor, RowInfo, SideInformation
from gradcomp_jax.kernels.random import GENERATORS, Generator


class TernaryPayload(NamedTuple):
    """Holds values in {-1, 0, 1} and, unless the workers share it, their scale.

    Attributes:
        trits: uint8 ``[rows, ceil(block / 5)]`` (base 3) or int8 ``[rows, block]``.
        scale: float32 ``[rows, 1]``, or ``None`` where the workers share it.
    """

    trits: Array
    scale: Array | None


@dataclasses.dataclass(frozen=True)
class Ternary(Compressor):
    """Implements :func:`ternary`."""

    clip: float | None
    granularity: Literal["tensor", "bucket"]
    share_scale: bool
    packing: Literal["base3", "int8"]
    downlink_code: Literal["exact", "ternary"]
    generator: Generator
    most_workers = 127  # a sum of 128 ones wraps in int8
    unbiased = True  # what clipping takes is lost on purpose
    scales = True

    @property
    def summable(self) -> bool:  # type: ignore[override]
        """Returns whether payloads add exactly: ternaries of one scale do if each has a byte."""
        return self.share_scale and self.packing == "int8"

    @property
    def side_information(self) -> SideInformation:  # type: ignore[override]
        """Returns ``max``, the common scale, if the workers share it, so that the sum is an integer number of levels."""
        return "max" if self.share_scale else None

    def statistic(self, rows: Array, info: RowInfo, state: PyTree = ()) -> Array:
        """Returns the largest magnitude after clipping."""
        return kernels.clip_bound(rows, info.need("count"), clip=self.clip, per_row=self.granularity == "bucket")

    def statistics(self, rows: Sequence[Array], infos: Sequence[RowInfo], states: Sequence[PyTree]) -> list[Array]:
        """Returns the largest magnitude after clipping of each tensor."""
        if self.clip is None or self.granularity == "bucket":
            return super().statistics(rows, infos, states)
        return kernels.clip_bounds(rows, [info.need("count") for info in infos], clip=self.clip)

    def encode(self, rows: Array, state: PyTree, info: RowInfo) -> tuple[TernaryPayload, PyTree]:
        """Clips, scales, rounds stochastically and packs."""
        bound = self.statistic_of(rows, info)
        # On the downlink of a code with a shared scale, that scale is the side information, but each bucket has its own scale.
        scale = info.side if self.share_scale and info.side is not None else bound
        code = kernels.ternarize_packed if self.packing == "base3" else kernels.ternarize
        trits = code(rows, bound, scale, info.need("key"), generator=self.generator)
        sent = None if self.share_scale else jnp.broadcast_to(scale, rows.shape[:1])[:, None]
        return TernaryPayload(trits, sent), state

    def decode(self, payload: TernaryPayload, info: RowInfo = RowInfo()) -> Array:
        """Multiplies values by their scale; also decodes a sum of int8 payloads."""
        scale = info.need("side")[:, None] if payload.scale is None else payload.scale
        trits = kernels.unpack_ternary(payload.trits, self.block) if self.packing == "base3" else payload.trits
        return trits.astype(jnp.float32) * scale

    def reduce(self, payloads: TernaryPayload, info: RowInfo = RowInfo()) -> Array:
        """Adds the integers first if the scale is shared, so that the sum has exactly 2N + 1 levels."""
        if not self.share_scale:
            return super().reduce(payloads, info)
        ones = jnp.ones((payloads.trits.shape[1],), jnp.float32)
        total = super().reduce(payloads, RowInfo(side=ones))
        return total if info.side is None else total * info.side[:, None]

    def downlink(self, workers: int) -> Compressor:
        """Returns exact levels of the sum, or ternary again with a scale for each bucket."""
        if self.downlink_code == "exact":
            return Levels(self.block, workers)
        return dataclasses.replace(self, granularity="bucket", share_scale=False, packing="base3")

    def exact_downlink(self, workers: int) -> bool:
        """Returns whether owners send levels, which are exact."""
        return self.downlink_code == "exact"


class LevelsPayload(NamedTuple):
    """Holds ``words``, uint32 ``[rows, ceil(block / d)]``, d digits in base 2N + 1 each."""

    words: Array


@dataclasses.dataclass(frozen=True)
class Levels(Compressor):
    """Sends the mean of N ternaries of one shared scale: an integer in [-N, N], times scale / N.

    It takes ``ceil(log2(2N + 1))`` bits a value or a little less: 4.57 at N = 8, 8 at N = 64.
    """

    workers: int
    scales = True

    def encode(self, rows: Array, state: PyTree, info: RowInfo) -> tuple[LevelsPayload, PyTree]:
        """Recovers the integers from the mean and packs them as digits."""
        scale = jnp.zeros((rows.shape[0],), jnp.float32) if info.side is None else info.side
        step = jnp.where(scale > 0, scale, 1.0)[:, None]
        integer = jnp.round(rows / step * self.workers).astype(jnp.int32) + self.workers
        digits = jnp.clip(integer, 0, 2 * self.workers).astype(jnp.uint32)
        return LevelsPayload(kernels.pack_digits(digits, 2 * self.workers + 1, word_bits=32)), state

    def decode(self, payload: LevelsPayload, info: RowInfo = RowInfo()) -> Array:
        """Returns scale / N times the integer."""
        digits = kernels.unpack_digits(payload.words, self.block, 2 * self.workers + 1)
        integer = digits.astype(jnp.int32) - self.workers
        scale = 1.0 if info.side is None else info.side[:, None]
        return integer.astype(jnp.float32) * scale / self.workers


@_arguments.checked
def ternary(
    *,
    bucket_size: int = 2048,
    clip: float | None = 2.5,
    granularity: Literal["tensor", "bucket"] = "tensor",
    share_scale: bool = True,
    packing: Literal["base3", "int8"] = "base3",
    downlink: Literal["exact", "ternary"] = "exact",
    generator: Generator = "hash",
) -> Ternary:
    r"""Makes TernGrad's stochastic ternary code: :math:`\hat g = s\,t`, :math:`t \in \{-1, 0, 1\}`.

    :math:`s = \max|g|` after clipping at :math:`c\,\sigma`; :math:`P(t_j = sign(g_j)) = |g_j| / s`, so that
    :math:`E[\hat g]` is the clipped gradient.

    Args:
        bucket_size: entries of a row.
        clip: c in units of the standard deviation; ``None`` does not clip.
        granularity: one scale for each tensor, or for each bucket.
        share_scale: the scale is the largest over the workers (one float32 each crosses), so the sum is an integer.
        packing: ``base3`` (1.6 bits) or ``int8`` (a byte, which ``collective="all_reduce"`` adds).
        downlink: ``exact``: the exact sum, as an integer; ``ternary``: ternarized again, cheaper and noisier.
        generator: ``hash`` or ``threefry``.

    Raises:
        ValueError: for values out of range, and for ``downlink="exact"`` without a shared scale.

    References:
        Wen et al., 2017, https://arxiv.org/abs/1705.07878, sections 3.1 (code), 3.3 (clipping, scaler sharing).
    """
    bucket_size = _checks.positive_int("bucket_size", bucket_size)
    if clip is not None and not (isinstance(clip, (int, float)) and clip > 0):
        raise ValueError(f"clip must be a positive Python number or None, got {clip}")
    _checks.one_of("granularity", granularity, ("tensor", "bucket"))
    _checks.one_of("packing", packing, ("base3", "int8"))
    _checks.one_of("downlink", downlink, ("exact", "ternary"))
    _checks.one_of("generator", generator, GENERATORS)
    if downlink == "exact" and not share_scale:
        raise ValueError(
            "downlink='exact' needs share_scale=True: sums of unlike scales are no integers; or use downlink='ternary'"
        )
    return Ternary(bucket_size, clip, granularity, share_scale, packing, downlink, generator)
