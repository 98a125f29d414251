"""DRIVE and EDEN: a random rotation makes any block look Gaussian, and a Gaussian has known best levels."""

import dataclasses

import jax
import jax.numpy as jnp

from gradcomp_jax import _checks, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.compressors.base import Compressor


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RotatedPayload:
    """``words``: packed level numbers, see :func:`~gradcomp_jax.kernels.encode_normal`; ``scale``: float32 ``[rows, 1]``."""

    words: Array
    scale: Array


@dataclasses.dataclass(frozen=True)
class Rotated(Compressor):
    """See :func:`rotated`."""

    bits: int
    block_size: int
    corrected: bool

    @property
    def block(self) -> int:
        """Entries that are rotated together."""
        return self.block_size

    @property
    def seeded(self) -> bool:
        """The rotation comes from the seeds."""
        return True

    @property
    def unbiased(self) -> bool:
        """With the unbiased scale, over uniformly random rotations; see :func:`rotated` for what Hadamard ones leave."""
        return self.corrected

    @property
    def fills(self) -> bool:
        """A rotation knows no padding."""
        return True

    def for_worker(self, shared: Array | None, worker: Array | int) -> Array | None:
        """Seeds of this worker's own: with one rotation for all, their errors would not average out."""
        return None if shared is None else kernels.fold_seeds(shared, worker)

    def encode(
        self,
        rows: Array,
        state: PyTree,
        key: Array,
        *,
        count: Array,
        local: Array | None = None,
        shared: Array | None = None,
    ) -> tuple[RotatedPayload, PyTree]:
        """Rotates, rounds to the nearest level, and finds the scale."""
        del key, count, local
        turned = kernels.rotate(rows, self._seeds(shared))
        square = jnp.sum(turned * turned, axis=1, keepdims=True)
        spread = jnp.sqrt(square / self.block)
        usable = ~(spread < jnp.finfo(jnp.float32).tiny)
        words = kernels.encode_normal(turned / jnp.where(usable, spread, 1.0), self.bits)
        levels = kernels.decode_normal(words, self.block, self.bits)
        along = jnp.sum(turned * levels, axis=1, keepdims=True)
        scale = square / along if self.corrected else along / jnp.sum(levels * levels, axis=1, keepdims=True)
        return RotatedPayload(words, jnp.where(usable, scale, 0.0)), state

    def _seeds(self, shared: Array | None) -> Array:
        if shared is None:
            raise ValueError("a rotated code needs the rows' seeds; pass them as shared=")
        return shared

    def decode(self, payload: RotatedPayload, *, shared: Array | None = None) -> Array:
        """Levels times scale, rotated back."""
        levels = kernels.decode_normal(payload.words, self.block, self.bits)
        return kernels.rotate_back(levels * payload.scale, self._seeds(shared))


def rotated(bits: int = 4, *, block: int = 1024, unbiased: bool = True) -> Rotated:
    r"""1 to 4 bits a value by random rotation, the best levels of a Gaussian, and one float32 scale for each block.

    :math:`R` is a randomized Hadamard rotation, :math:`y = R x`, :math:`q = Q(y / \sigma_y)` the nearest Lloyd-Max levels,
    and :math:`\hat x = S R^{-1} q` with :math:`S = \|x\|^2 / \langle y, q \rangle` (unbiased) or
    :math:`S = \langle y, q \rangle / \|q\|^2` (the least square error, for use with a residual).

    The first scale is unbiased over uniformly random rotations. A randomized Hadamard rotation comes near to one unless two or
    three entries of a block are nearly all of it: such a block at 1 bit may decode to its largest entry in every draw.

    Seeds follow from step, tensor and worker, and are not sent. One bit is DRIVE, more are EDEN. Bits on the wire: 1, 2,
    3.2 (ten values in 32 bits) or 4, and 32 / block.

    Args:
        bits: 1, 2, 3 or 4.
        block: entries that are rotated together, a power of two.
        unbiased: which scale.

    Raises:
        ValueError: for another width, and for a block that is no power of two.

    References:
        Vargaftik et al., 2021, DRIVE, https://arxiv.org/abs/2105.08339, sections 3 and 4; Vargaftik et al., 2022, EDEN,
        https://arxiv.org/abs/2108.08842, section 3.
    """
    _checks.one_of("bits", bits, (1, 2, 3, 4))
    if _checks.positive_int("block", block) & (block - 1):
        raise ValueError(f"block must be a power of two for a Hadamard rotation, got {block}")
    return Rotated(bits, block, unbiased)
