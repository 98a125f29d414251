"""Formats of matrix units on the wire: elements of 8 or 4 bits, and a scale of 8 bits for each block of 32 or 16."""

import dataclasses
from typing import Any

from gradcomp_jax import kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.compressors.base import LARGEST, Compressor, RowInfo
from gradcomp_jax.kernels import Microscaled
from gradcomp_jax.kernels.microscaling import FORMATS, Microscaling

ROW = 256
"""Entries of a row, the default block of integers: a tensor has as many rows in either, and memories of one shape."""


@dataclasses.dataclass(frozen=True)
class MicroscaledFloat(Compressor):
    """Implements the formats ``mxfp8``, ``mxfp4`` and ``nvfp4`` of :func:`~gradcomp_jax.compressors.block_quantized`.

    A row is several blocks.
    """

    format: Microscaling
    scales = True
    by_row = True

    def statistic(self, rows: Array, info: RowInfo, state: PyTree = ()) -> Array:
        """Returns the largest magnitude of each block: float32 ``[rows, blocks]``."""
        return kernels.largest_of_blocks(rows, self.format)

    def encode(self, rows: Array, state: PyTree, info: RowInfo) -> tuple[Microscaled, PyTree]:
        """Scales each block by its largest magnitude and rounds to the nearest."""
        return kernels.to_microscaled(rows, self.format, self.statistic_of(rows, info)), state

    def decode(self, payload: Microscaled, info: RowInfo = RowInfo()) -> Array:
        """Multiplies every element by its scales."""
        return kernels.from_microscaled(payload, self.format)

    def finite(self, payload: Microscaled, statistic: Any, largest: float = LARGEST) -> Array:
        """Reads the scales as numbers: of the mean that an owner encodes the payload is all there is."""
        return super().finite(payload, (statistic, kernels.scales_of(payload.scale, self.format)), largest)


def microscaled(format: Microscaling, **given: Any) -> MicroscaledFloat:
    """Returns the code of a format, which has its own bits, block and rounding.

    Raises:
        ValueError: for another value of one of these.
    """
    own = {"bits": FORMATS[format].bits, "block": FORMATS[format].block, "stochastic": False, "norm": "max"}
    for name, value in given.items():
        if value is not None and value != own[name]:
            raise ValueError(
                f"format={format!r} has {name}={own[name]!r}, got {name}={value!r}: leave {name} out, or take format='int'"
            )
    return MicroscaledFloat(ROW, format)
