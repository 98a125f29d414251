"""TernGrad's code: a scale and values in {-1, 0, 1}, five to a byte; and its exact way back.

Wen et al., 2017, TernGrad, https://arxiv.org/abs/1705.07878.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from gradcomp_jax import _checks, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.compressors.base import Compressor
from gradcomp_jax.kernels.random import GENERATORS, Generator


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TernaryPayload:
    """Values in {-1, 0, 1} and, unless the workers share it, their scale.

    Attributes:
        trits: uint8 ``[rows, ceil(block / 5)]`` (base 3) or int8 ``[rows, block]``.
        scale: float32 ``[rows, 1]``, or ``None`` where the workers share it.
    """

    trits: Array
    scale: Array | None


@dataclasses.dataclass(frozen=True)
class Ternary(Compressor):
    """See :func:`ternary`."""

    bucket_size: int
    clip: float | None
    granularity: Literal["tensor", "bucket"]
    share_scale: bool
    packing: Literal["base3", "int8"]
    down: Literal["levels", "ternary"]
    generator: Generator

    @property
    def block(self) -> int:
        """A row is a bucket."""
        return self.bucket_size

    @property
    def summable(self) -> bool:
        """Ternaries of one scale add exactly, as long as each has a byte to grow in."""
        return self.share_scale and self.packing == "int8"

    @property
    def most_workers(self) -> int:
        """A sum of 128 ones wraps in int8."""
        return 127

    @property
    def unbiased(self) -> bool:
        """Rounding is stochastic; what clipping takes is lost on purpose."""
        return True

    @property
    def agrees(self) -> Literal["max"] | None:
        """On the scale, so that the sum is an integer of levels."""
        return "max" if self.share_scale else None

    def measure(self, rows: Array, count: Array, state: PyTree = ()) -> Array:
        """The largest magnitude after clipping."""
        del state
        return kernels.clip_bound(rows, count, clip=self.clip, per_row=self.granularity == "bucket")

    def encode(
        self,
        rows: Array,
        state: PyTree,
        key: Array,
        *,
        count: Array,
        local: Array | None = None,
        shared: Array | None = None,
    ) -> tuple[TernaryPayload, PyTree]:
        """Clips, scales, rounds stochastically and packs."""
        bound = self.measure(rows, count) if local is None else local
        # On the way back of a code with a shared scale, that scale is handed over too, but each bucket has its own.
        scale = shared if self.share_scale and shared is not None else bound
        code = kernels.ternarize_packed if self.packing == "base3" else kernels.ternarize
        trits = code(rows, bound, scale, key, generator=self.generator)
        sent = None if self.share_scale else jnp.broadcast_to(scale, rows.shape[:1])[:, None]
        return TernaryPayload(trits, sent), state

    def _trits(self, payload: TernaryPayload) -> Array:
        return kernels.unpack_ternary(payload.trits, self.block) if self.packing == "base3" else payload.trits

    def decode(self, payload: TernaryPayload, *, shared: Array | None = None) -> Array:
        """Scale times value; also decodes a sum of int8 payloads."""
        scale = payload.scale
        if scale is None:
            if shared is None:
                raise ValueError("workers share this code's scale, and it is not in the payload; pass it as shared=")
            scale = shared[:, None]
        return self._trits(payload).astype(jnp.float32) * scale

    def reduce(self, payloads: TernaryPayload, *, shared: Array | None = None) -> Array:
        """With a shared scale the integers are added first, so the sum has exactly 2N + 1 levels."""
        if not self.share_scale:
            return super().reduce(payloads, shared=shared)
        ones = jnp.ones((payloads.trits.shape[1],), jnp.float32)
        total = super().reduce(payloads, shared=ones)
        return total if shared is None else total * shared[:, None]

    def back(self, workers: int) -> Compressor:
        """Exact levels of the sum, or ternary once more with a scale for each bucket."""
        if self.down == "levels":
            return Levels(self.bucket_size, workers)
        return dataclasses.replace(self, granularity="bucket", share_scale=False, packing="base3")

    def exact_back(self, workers: int) -> bool:
        """Levels are."""
        return self.down == "levels"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LevelsPayload:
    """``words``: uint32 ``[rows, ceil(block / d)]``, d digits in base 2N + 1 each."""

    words: Array


@dataclasses.dataclass(frozen=True)
class Levels(Compressor):
    """The mean of N ternaries of one shared scale: an integer in [-N, N], times scale / N.

    Takes ``ceil(log2(2N + 1))`` bits or a little less a value: 4.57 at N = 8, 8 at N = 64.
    """

    bucket_size: int
    workers: int

    @property
    def block(self) -> int:
        """As the ternary code's."""
        return self.bucket_size

    def encode(
        self,
        rows: Array,
        state: PyTree,
        key: Array,
        *,
        count: Array,
        local: Array | None = None,
        shared: Array | None = None,
    ) -> tuple[LevelsPayload, PyTree]:
        """Recovers the integers from the mean and packs them as digits."""
        del key, count, local
        scale = jnp.zeros((rows.shape[0],), jnp.float32) if shared is None else shared
        step = jnp.where(scale > 0, scale, 1.0)[:, None]
        integer = jnp.round(rows / step * self.workers).astype(jnp.int32) + self.workers
        digits = jnp.clip(integer, 0, 2 * self.workers).astype(jnp.uint32)
        return LevelsPayload(kernels.pack_digits(digits, 2 * self.workers + 1, word_bits=32)), state

    def decode(self, payload: LevelsPayload, *, shared: Array | None = None) -> Array:
        """Scale / N times the integer."""
        digits = kernels.unpack_digits(payload.words, self.block, 2 * self.workers + 1)
        integer = digits.astype(jnp.int32) - self.workers
        scale = 1.0 if shared is None else shared[:, None]
        return integer.astype(jnp.float32) * scale / self.workers


def ternary(
    *,
    bucket_size: int = 2048,
    clip: float | None = 2.5,
    granularity: Literal["tensor", "bucket"] = "tensor",
    share_scale: bool = True,
    packing: Literal["base3", "int8"] = "base3",
    down: Literal["levels", "ternary"] = "levels",
    generator: Generator = "hash",
) -> Ternary:
    r"""Stochastic ternary code of TernGrad: :math:`\hat g = s\,t`, :math:`t \in \{-1, 0, 1\}`.

    :math:`s = \max|g|` after clipping at :math:`c\,\sigma`; :math:`P(t_j = sign(g_j)) = |g_j| / s`, so that
    :math:`E[\hat g]` is the clipped gradient.

    Args:
        bucket_size: entries of a row.
        clip: c in units of the standard deviation; ``None`` does not clip.
        granularity: one scale for each tensor, or for each bucket.
        share_scale: the scale is the largest over the workers (one float32 each crosses), so the sum is an integer.
        packing: ``base3`` (1.6 bits) or ``int8`` (a byte, which ``route="sum"`` adds).
        down: ``levels``: the exact sum on the way back; ``ternary``: ternarized once more, cheaper and noisier.
        generator: ``hash`` or ``threefry``.

    Raises:
        ValueError: for values out of range, and for ``down="levels"`` without a shared scale.

    References:
        Wen et al., 2017, https://arxiv.org/abs/1705.07878, sections 3.1 (code), 3.3 (clipping, scaler sharing).
    """
    _checks.positive_int("bucket_size", bucket_size)
    if clip is not None and not (isinstance(clip, (int, float)) and clip > 0):
        raise ValueError(f"clip must be a positive Python number or None, got {clip}")
    _checks.one_of("granularity", granularity, ("tensor", "bucket"))
    _checks.one_of("packing", packing, ("base3", "int8"))
    _checks.one_of("down", down, ("levels", "ternary"))
    _checks.one_of("generator", generator, GENERATORS)
    if down == "levels" and not share_scale:
        raise ValueError(
            "down='levels' needs share_scale=True: sums of unlike scales are no integers; or use down='ternary'"
        )
    return Ternary(bucket_size, clip, granularity, share_scale, packing, down, generator)
