"""What the quantizers do to rows of numbers, from the papers' formulas, in NumPy and float64.

A code is called with rows ``[rows, block]``, the mask of what is no padding, and random numbers of that shape. It returns
what the rows decode to, and which rows' decisions were all clear of their borders: there float32 decides alike.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import ml_dtypes
import numpy as np
import scipy.linalg
import scipy.stats

Result = tuple[np.ndarray, np.ndarray]

CLEAR = 1e-5
"""How far from a border is far enough, in units of a row's largest magnitude: float32 rounding of some twenty steps."""


def clear(decide: Callable[[np.ndarray], np.ndarray], x: np.ndarray, zeros_stay: bool = True) -> np.ndarray:
    """The rows of which no decision would be another one a little to the side; most zeros are so in every precision."""
    aside = np.where((x == 0) & zeros_stay, 0.0, CLEAR * np.abs(x).max(axis=1, keepdims=True))
    return (decide(x + aside) == decide(x - aside)).all(axis=1)


def every(x: np.ndarray) -> np.ndarray:
    return np.ones(x.shape[0], bool)


def or_one(x: np.ndarray) -> np.ndarray:
    return np.where(x == 0, 1.0, x)


@dataclasses.dataclass(frozen=True)
class Means:
    """1-bit SGD, section 3.2: each sign stands for the mean of the row's entries of that sign."""

    draws: ClassVar[None] = None

    def __call__(self, x: np.ndarray, valid: np.ndarray, drawn: None) -> Result:
        negative = x < 0
        decoded = np.zeros(x.shape)
        for which in (valid & ~negative, valid & negative):
            mean = (x * which).sum(axis=1, keepdims=True) / np.maximum(which.sum(axis=1, keepdims=True), 1)
            decoded += which * mean
        return decoded, clear(lambda v: v < 0, x)


@dataclasses.dataclass(frozen=True)
class MeanMagnitude:
    """EF-signSGD, algorithm 1: the L1 norm over the number of entries, times the signs."""

    draws: ClassVar[None] = None

    def __call__(self, x: np.ndarray, valid: np.ndarray, drawn: None) -> Result:
        size = np.abs(x).sum(axis=1, keepdims=True) / np.maximum(valid.sum(axis=1, keepdims=True), 1)
        return np.where(x < 0, -size, size) * valid, clear(lambda v: v < 0, x)


@dataclasses.dataclass(frozen=True)
class Vote:
    """signSGD: the signs themselves; an exact zero votes by lot, and a row of nothing but zeros does not vote."""

    draws: ClassVar[str] = "coin"

    def __call__(self, x: np.ndarray, valid: np.ndarray, drawn: np.ndarray) -> Result:
        votes = np.where((x < 0) | ((x == 0) & (drawn != 0)), -1.0, 1.0)
        return votes * valid * x.any(axis=1, keepdims=True), clear(lambda v: v < 0, x)


@dataclasses.dataclass(frozen=True)
class Integers:
    """Norm over L times an integer: to the nearest (ZeRO++), or QSGD's up with the probability of the fraction."""

    bits: int
    norm: str = "max"
    draws: str | None = None

    def __call__(self, x: np.ndarray, valid: np.ndarray, drawn: np.ndarray | None) -> Result:
        most = 2 ** (self.bits - 1) - 1
        order = np.inf if self.norm == "max" else 2
        step = np.linalg.norm(x, order, axis=1, keepdims=True) / most

        def decide(v: np.ndarray) -> np.ndarray:
            v = v / or_one(step)
            whole = np.rint(v) if drawn is None else np.floor(v) + (drawn < v - np.floor(v))
            return np.clip(whole, -most, most)

        return decide(x) * step, clear(decide, x)


@dataclasses.dataclass(frozen=True)
class PowersOfTwo:
    """E3M0: to the nearest of zero and seven powers of two of each sign, of which the largest is the row's largest."""

    draws: ClassVar[None] = None

    def __call__(self, x: np.ndarray, valid: np.ndarray, drawn: None) -> Result:
        top = np.abs(x).max(axis=1, keepdims=True)
        levels = np.asarray([0.0, *(2.0**-e for e in reversed(range(7)))])

        def decide(v: np.ndarray) -> np.ndarray:
            nearest = np.abs(np.abs(v / or_one(top))[..., None] - levels).argmin(axis=-1)
            return np.sign(v) * levels[nearest]

        return decide(x) * top, clear(decide, x)


@dataclasses.dataclass(frozen=True)
class FixedPoint:
    """Gupta et al., section 3: stochastic rounding to one grid, saturating. Exact in float32, so nothing is unclear."""

    bits: int
    fraction_bits: int
    draws: ClassVar[str] = "uniform"

    def __call__(self, x: np.ndarray, valid: np.ndarray, drawn: np.ndarray) -> Result:
        step = 2.0**-self.fraction_bits
        below = np.floor(x / step) * step
        rounded = np.where(drawn < (x - below) / step, below + step, below)
        return np.clip(rounded, -(2 ** (self.bits - 1)) * step, (2 ** (self.bits - 1) - 1) * step), every(x)


@dataclasses.dataclass(frozen=True)
class Float8:
    """Casts to eight-bit floats; scaled, each row's largest entry becomes the format's largest number."""

    format: str
    scaled: bool
    draws: ClassVar[None] = None

    def __call__(self, x: np.ndarray, valid: np.ndarray, drawn: None) -> Result:
        dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[self.format]
        top = float(ml_dtypes.finfo(dtype).max)
        scale = or_one(np.abs(x).max(axis=1, keepdims=True) / top) if self.scaled else 1.0

        def decide(v: np.ndarray) -> np.ndarray:
            return np.clip(v / scale, -top, top).astype(dtype).astype(np.float64)

        # A plain cast of float32 numbers, and of means of a few casts, is exact arithmetic up to the rounding.
        return decide(x) * scale, clear(decide, x) if self.scaled else every(x)


def best_levels(bits: int) -> np.ndarray:
    """Lloyd's and Max's levels for a standard normal: each is the mean of what is nearest to it."""
    normal = scipy.stats.norm
    levels = normal.ppf((np.arange(2**bits) + 0.5) / 2**bits)
    for _ in range(5000):
        edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        levels = -np.diff(normal.pdf(edges)) / np.diff(normal.cdf(edges))
    return levels


@dataclasses.dataclass(frozen=True)
class Rotated:
    """DRIVE and EDEN: y = H D x, q the nearest levels of y over its deviation, decoded to S D H q.

    With the unbiased scale y = H G'' D'' H G' D' H G D x: G turns entries j and j + n / 2 in their plane.
    """

    bits: int
    unbiased: bool
    levels: tuple[float, ...] = ()
    draws: ClassVar[str] = "turns"

    @classmethod
    def of(cls, bits: int, *, unbiased: bool) -> "Rotated":
        return cls(bits, unbiased, tuple(best_levels(bits)))

    def __call__(self, x: np.ndarray, valid: np.ndarray, drawn: np.ndarray) -> Result:
        size = x.shape[1]
        hadamard = scipy.linalg.hadamard(size) / np.sqrt(size)
        signs = np.split(drawn[:, : 3 * size], 3, axis=1)
        angles = [2 * np.arctan(t) for t in np.split(drawn[:, 3 * size :].astype(np.float64), 3, axis=1)]
        rounds = [(signs[0], 0 * angles[0])]
        if self.unbiased:
            rounds = list(zip(signs, angles, strict=True))[: 2 if size >= 256 else 3]
        y = x
        for sign, angle in rounds:
            y = in_planes(y * sign, angle) @ hadamard.T
        length = (y**2).sum(axis=1, keepdims=True)
        book = np.asarray(self.levels)

        def decide(v: np.ndarray) -> np.ndarray:
            return np.argmin(np.abs((v / or_one(np.sqrt(length / size)))[:, :, None] - book), axis=2)

        q = book[decide(y)] * (length > 0)
        along = (y * q).sum(axis=1, keepdims=True)
        scale = length / or_one(along) if self.unbiased else along / or_one((q**2).sum(axis=1, keepdims=True))
        decoded = scale * q
        for sign, angle in reversed(rounds):
            decoded = in_planes(decoded @ hadamard, -angle) * sign
        return decoded * valid, clear(decide, y, zeros_stay=False)


def in_planes(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Complex numbers of two halves, turned."""
    first, second = np.split(x, 2, axis=1)
    turned = (first + 1j * second) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=1)
