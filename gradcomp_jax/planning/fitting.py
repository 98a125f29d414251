"""A line through measured times, which outliers do not bend."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_ROUNDS = 50
# Huber's constant for relative errors: what is off by more than this counts less and less.
_OUTLIER = 0.1


class Point(NamedTuple):
    """What a collective took. Attributes: bytes that one device sends, seconds (median), least and most of them."""

    sent: float
    seconds: float
    least: float
    most: float


@dataclasses.dataclass(frozen=True)
class Fit:
    r"""Seconds of a collective that sends :math:`m` bytes from each device: :math:`\alpha + \beta m`.

    Attributes:
        alpha: seconds, at least 0.
        beta: seconds for each byte, at least 0.
        points: what it was fitted to.
    """

    alpha: float
    beta: float
    points: tuple[Point, ...]

    def line(self, sent: float) -> float:
        """Seconds by the line alone."""
        return self.alpha + self.beta * sent

    def seconds(self, sent: float) -> float:
        """Seconds: between two measured sizes by a straight line through both, beyond them along the fitted line.

        Few networks are a line over six orders of magnitude: windows open, and protocols change with the size.
        """
        first, last = self.points[0], self.points[-1]
        if sent <= first.sent:
            return first.seconds
        if sent >= last.sent:
            return last.seconds + self._slope() * (sent - last.sent)
        return float(np.interp(sent, [p.sent for p in self.points], [p.seconds for p in self.points]))

    @property
    def errors(self) -> tuple[float, float]:
        """Of the line, relative to what was measured: the median and the largest."""
        off = [abs(self.line(p.sent) / p.seconds - 1) for p in self.points]
        return float(np.median(off)), max(off)

    def _slope(self) -> float:
        """Seconds a byte beyond the largest size: that of the last two sizes, which have the widest windows."""
        if len(self.points) < 2:
            return self.beta
        before, last = self.points[-2:]
        return max(0.0, (last.seconds - before.seconds) / (last.sent - before.sent))


def fit(points: Sequence[Point]) -> Fit:
    """The line with the least sum of Huber's losses of the relative errors; neither term is below 0.

    Relative, because sizes span orders of magnitude; reweighted least squares, as many rounds as it takes.

    Raises:
        ValueError: for fewer than two different sizes, or times that are not above 0.

    References:
        Huber, 1964, Robust Estimation of a Location Parameter.
    """
    ordered = tuple(sorted(points))
    if len({p.sent for p in ordered}) < 2:
        raise ValueError("a line needs points of at least two sizes")
    if any(not (p.seconds > 0 and math.isfinite(p.seconds)) for p in ordered):
        raise ValueError("times must be finite and above 0")
    sizes, times = np.array([p.sent for p in ordered]), np.array([p.seconds for p in ordered])
    weights = np.ones(len(ordered))
    alpha, beta = 0.0, 0.0
    for _ in range(_ROUNDS):
        before = alpha, beta
        alpha, beta = _least_squares(sizes, times, weights)
        off = np.abs((alpha + beta * sizes) / times - 1)
        weights = np.minimum(1.0, _OUTLIER / np.maximum(off, 1e-12))
        if np.allclose((alpha, beta), before, rtol=1e-9, atol=0):
            break
    return Fit(alpha, beta, ordered)


def _least_squares(sizes: np.ndarray, times: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Minimizes the weighted sum of squared relative errors with both terms at least 0."""
    scale = np.sqrt(weights) / times
    columns = np.stack([scale, scale * sizes], axis=1)
    wanted = np.sqrt(weights)
    # The columns differ by orders of magnitude: each to length one first.
    length = np.linalg.norm(columns, axis=0)
    found = np.linalg.lstsq(columns / length, wanted, rcond=None)[0] / length
    if found.min() >= 0:
        return float(found[0]), float(found[1])
    alone = [max(0.0, float(c @ wanted / (c @ c))) for c in columns.T]
    losses = [float(np.sum((columns[:, i] * alone[i] - wanted) ** 2)) for i in (0, 1)]
    return (alone[0], 0.0) if losses[0] <= losses[1] else (0.0, alone[1])
