"""Lossless deltas of 16-bit words: where they changed, as gaps, and by how much, under zstd.

At the learning rates of fine-tuning almost all bfloat16 weights keep their bits in a step.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradcomp_jax.islands.objects import NotOursError
from gradcomp_jax.islands.store import EXTRA

Words = NDArray[np.uint16]

_SPARSE = 16
"""A delta of fewer than one in so many words has positions; a denser one has all differences."""
_LEVEL = 1


def zstandard_library() -> Any:
    """Returns the library, or says what brings it."""
    try:
        import zstandard
    except ImportError as error:
        raise ImportError(f"deltas of weights are compressed by zstandard: {EXTRA}") from error
    return zstandard


def encode_delta(old: Words, new: Words) -> tuple[dict[str, Any], bytes]:
    """Returns what a head says of a delta, and its bytes.

    Differences are taken modulo 2**16: a weight that moves by one step of its grid is one or 65,535, whatever its bits.
    """
    changed = np.flatnonzero(old != new)
    if changed.size * _SPARSE < old.size:
        gaps = np.diff(changed, prepend=-1) - 1
        moves = new[changed] - old[changed]
        parts = [*_planes(gaps.astype("<u4"), 4), *_planes(moves.astype("<u2"), 2)]
        mode = "gaps"
    else:
        parts, mode = _planes((new - old).astype("<u2"), 2), "all"
    pack = zstandard_library().ZstdCompressor(level=_LEVEL).compress
    packed = [pack(part) for part in parts]
    return {"mode": mode, "count": int(changed.size), "lengths": [len(part) for part in packed]}, b"".join(packed)


def apply_delta(old: Words, head: Mapping[str, Any], body: bytes) -> Words:
    """Inverts :func:`encode_delta`.

    Raises:
        ValueError: for bytes that are no delta of as many words.
    """
    count, mode = head["count"], head["mode"]
    size = old.size if mode == "all" else count
    widths = {"gaps": 6, "all": 2}.get(mode, 0)
    if len(head["lengths"]) != widths or sum(head["lengths"]) != len(body) or not 0 <= count <= old.size:
        raise NotOursError("this is no delta of these weights")
    planes, start = [], 0
    for length in head["lengths"]:
        planes.append(_unpacked(body[start : start + length], size))
        start += length
    if mode == "all":
        return old + _joined(planes, "<u2")
    places = np.cumsum(_joined(planes[:4], "<u4").astype(np.int64) + 1) - 1
    if count and places[-1] >= old.size:
        raise NotOursError("this delta has positions beyond these weights")
    new = old.copy()
    new[places] += _joined(planes[4:], "<u2")
    return new


def _planes(numbers: Any, width: int) -> list[bytes]:
    """Returns the first bytes of all numbers, then the second ones: those that are mostly zero are by themselves."""
    table = numbers.view(np.uint8).reshape(-1, width)
    return [np.ascontiguousarray(table[:, i]).tobytes() for i in range(width)]


def _joined(planes: list[Any], dtype: str) -> Any:
    return np.stack(planes, axis=1).view(dtype)[:, 0].astype(dtype[1:])


def _unpacked(data: bytes, size: int) -> Any:
    library = zstandard_library()
    try:
        unpacked = library.ZstdDecompressor().decompress(data, max_output_size=max(1, size))
    except library.ZstdError as error:
        raise NotOursError(f"this is no delta: {error}") from error
    if len(unpacked) != size:
        raise NotOursError("this delta has another length than it says")
    return np.frombuffer(unpacked, np.uint8)
