"""Shapes in HLO text, and the bytes they hold."""

import dataclasses
import functools
import math
import re

_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\]")
_BITS = re.compile(r"(?:s|u|f|bf|c)(\d+)(?:e\d+m\d+[a-z0-9]*)?")
# Values that order or refer to things and hold no data.
_NO_DATA = ("token", "opaque")


@dataclasses.dataclass(frozen=True)
class ArrayShape:
    """Describes one array: an HLO element type such as ``bf16``, and its dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Returns the number of elements; a dynamic dimension counts its bound."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Returns the bytes of the packed array: entries of 2 and 4 bits share bytes, and the total is rounded up."""
        return -(-self.elements * bits_of(self.dtype) // 8)


def bits_of(dtype: str) -> int:
    """Returns the bits of one element of an HLO type: 8 for ``pred``, 16 for ``bf16``.

    Raises:
        ValueError: if the type is unknown, since guessing would give a wrong count.
    """
    if dtype == "pred":
        return 8
    if dtype in _NO_DATA:
        return 0
    match = _BITS.fullmatch(dtype)
    if match is None:
        raise ValueError(f"unknown HLO element type {dtype!r}: teach bits_of its size")
    return int(match[1])


@functools.lru_cache(maxsize=4096)
def parse_shape(text: str) -> tuple[ArrayShape, ...]:
    """Reads a shape, flattening tuples: ``(f32[8]{0}, u32[])`` gives two arrays.

    Layouts, tilings and memory spaces (``{1,0:T(8,128)S(1)}``) are ignored: padding in memory
    does not cross the wire.

    Raises:
        ValueError: if a dimension has no bound.
    """
    arrays = []
    for dtype, dims in _ARRAY.findall(text):
        sizes = [d.strip().removeprefix("<=") for d in dims.split(",") if d.strip()]
        if not all(size.isdigit() for size in sizes):
            raise ValueError(f"shape {dtype}[{dims}] has a dimension without a bound")
        arrays.append(ArrayShape(dtype, tuple(int(size) for size in sizes)))
    return tuple(arrays)
