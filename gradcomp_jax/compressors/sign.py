"""One bit a value: signs, and the values that they stand for in each block."""

import dataclasses
from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp

from gradcomp_jax import _arguments, _checks, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.compressors.base import Compressor, RowInfo

Scaling = Literal["means", "l1", "unit"]


class SignPayload(NamedTuple):
    """Holds signs and their values.

    Attributes:
        words: uint8 ``[rows, ceil(block / 8)]``; a bit is set where an entry is negative.
        values: float32 ``[rows, 2]``, what positive and negative entries decode to (``means``); float32 ``[rows, 1]``, the
            magnitude of both (``l1``); uint8 ``[rows, 1]``, 1 unless the whole row is zero (``unit``).
    """

    words: Array
    values: Array


@dataclasses.dataclass(frozen=True)
class Sign(Compressor):
    """Implements :func:`sign`."""

    scaling: Scaling
    pads_nonzero = True  # padding has a sign too
    scales = True

    def statistic(self, rows: Array, info: RowInfo, state: PyTree = ()) -> Array:
        """Sums magnitudes; for ``means``, sums positive and negative entries, and counts the negative ones.

        The result is float32 ``[rows, 3]`` for ``means``, otherwise ``[rows, 1]``.
        """
        if self.scaling != "means":
            return kernels.sum_of_rows(jnp.abs(rows))[:, None]
        # Separate sums: a difference of sums would lose the smaller. XLA:CPU's maximum takes a NaN for 0, a select does not.
        parts = (jnp.maximum(rows, 0.0), jnp.where(rows > 0, 0.0, rows), (rows < 0).astype(jnp.float32))
        return kernels.sums_of_rows(*parts)

    def encode(self, rows: Array, state: PyTree, info: RowInfo) -> tuple[SignPayload, PyTree]:
        """Packs the signs. Exact zeros count as positive; with ``unit`` values, which cannot correct that, they draw a sign."""
        sums = self.statistic_of(rows, info)
        if self.scaling == "unit":
            coin = kernels.hash_bits(info.need("key"), rows.shape) >> 31 == 1
            words = kernels.pack_bits((rows < 0) | ((rows == 0) & coin), 1)
            # A NaN is not equal to zero; an entry that is not finite shows in the sum.
            return SignPayload(words, (sums != 0).astype(jnp.uint8)), state
        entries = info.need("count").astype(jnp.float32)
        if self.scaling == "l1":
            values = sums / jnp.maximum(entries, 1.0)[:, None]
        else:
            above, below, negatives = jnp.unstack(sums, axis=1)
            positives = entries - negatives
            values = jnp.stack([above / jnp.maximum(positives, 1.0), below / jnp.maximum(negatives, 1.0)], axis=1)
        return SignPayload(kernels.pack_signs(rows), values), state

    def decode(self, payload: SignPayload, info: RowInfo = RowInfo()) -> Array:
        """Returns the values that the signs stand for."""
        signs = kernels.unpack_signs(payload.words, self.block)
        values = payload.values.astype(jnp.float32)
        if self.scaling != "means":
            return signs * values
        return jnp.where(signs > 0, values[:, :1], values[:, 1:])


@_arguments.checked
def sign(scaling: Scaling = "l1", *, block: int = 2048) -> Sign:
    r"""Sends one bit a value, and for each block the values that the two signs stand for.

    - ``means``: the mean of the block's positive and the mean of its negative entries (1-bit SGD).
    - ``l1``: :math:`\pm \|x\|_1 / n` (EF-signSGD).
    - ``unit``: :math:`\pm 1` (signSGD). An entry that is exactly zero draws its sign, so that entries without a gradient
      are not pushed to one side; a block of zeros decodes to zeros.

    A block of zeros decodes to zeros in all three. ``means`` and ``l1`` need error feedback.

    Args:
        scaling: ``means``, ``l1`` or ``unit``.
        block: entries that share their values.

    Raises:
        ValueError: for an unknown scaling, and for a block below 1.

    References:
        Seide et al., 2014, 1-Bit Stochastic Gradient Descent, Interspeech, section 3.2; Bernstein et al., 2018,
        https://arxiv.org/abs/1802.04434; Karimireddy et al., 2019, https://arxiv.org/abs/1901.09847.
    """
    _checks.one_of("scaling", scaling, get_args(Scaling))
    return Sign(_checks.positive_int("block", block), scaling)
