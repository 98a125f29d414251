"""Fixed-point numbers by stochastic rounding: a grid that is the same for every tensor, worker and step."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from gradcomp_jax import _arguments, _checks, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.compressors.base import Compressor, RowInfo
from gradcomp_jax.kernels.random import GENERATORS, Generator


class FixedPointPayload(NamedTuple):
    """Holds ``words``, int8 or int16 ``[rows, block]``, in units of ``2**-fraction_bits``."""

    words: Array


@dataclasses.dataclass(frozen=True)
class FixedPoint(Compressor):
    """Implements :func:`fixed_point`."""

    bits: int
    fraction_bits: int
    generator: Generator
    measures_largest = True  # integers cannot hold a number that is not finite
    unbiased = True  # what lies beyond the range is lost on purpose

    def encode(self, rows: Array, state: PyTree, info: RowInfo) -> tuple[FixedPointPayload, PyTree]:
        """Rounds to the grid, up or down with the probability that makes the expectation the value."""
        key, bits, fraction_bits = info.need("key"), self.bits, self.fraction_bits
        words = kernels.to_fixed(rows, key, bits=bits, fraction_bits=fraction_bits, generator=self.generator)
        return FixedPointPayload(words), state

    def decode(self, payload: FixedPointPayload, info: RowInfo = RowInfo()) -> Array:
        """Returns the integers times the grid's step."""
        return kernels.from_fixed(payload.words, self.fraction_bits)

    def reduce(self, payloads: FixedPointPayload, info: RowInfo = RowInfo()) -> Array:
        """Adds the integers, which is exact."""
        total = jnp.sum(payloads.words.astype(jnp.int32), axis=0)
        return kernels.from_fixed(total, self.fraction_bits)


@_arguments.checked
def fixed_point(
    *, bits: int = 16, fraction_bits: int = 12, block: int = 1024, generator: Generator = "hash"
) -> FixedPoint:
    r"""Rounds stochastically to integers of 8 or 16 bits times :math:`\epsilon = 2^{-F}` (fixed point).

    :math:`P(\lfloor x \rfloor + \epsilon) = (x - \lfloor x \rfloor) / \epsilon`, so the expectation is the value wherever it
    lies in :math:`[-2^{bits-1} \epsilon, (2^{bits-1} - 1) \epsilon]`; what lies beyond saturates.

    Args:
        bits: 16 or 8.
        fraction_bits: F; with 16 bits and the default the range is (-8, 8) and the step 0.00024.
        block: entries of a row.
        generator: ``hash`` or ``threefry``.

    Raises:
        ValueError: for an unknown width, or a negative ``fraction_bits``.

    References:
        Gupta et al., 2015, https://arxiv.org/abs/1502.02551, section 3.
    """
    _checks.one_of("bits", bits, (16, 8))
    _checks.at_least_zero("fraction_bits", _checks.static_number("fraction_bits", fraction_bits))
    _checks.one_of("generator", generator, GENERATORS)
    return FixedPoint(_checks.positive_int("block", block), bits, int(fraction_bits), generator)
