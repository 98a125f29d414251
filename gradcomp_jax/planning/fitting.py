"""Fits a line through measured times that outliers do not bend."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Point(NamedTuple):
    """Holds what a collective took: the bytes that one device sends, and its seconds (median, least and most)."""

    sent: float
    seconds: float
    least: float
    most: float

    @property
    def known(self) -> float:
        """Returns the time, or the spread of the repetitions if that is larger."""
        return max(self.seconds, self.most - self.least)


@dataclasses.dataclass(frozen=True)
class Fit:
    r"""Gives the seconds of a collective that sends :math:`m` bytes from each device: :math:`\alpha + \beta m`.

    Attributes:
        alpha: seconds, at least 0.
        beta: seconds for each byte, at least 0.
        points: the points that it was fitted to.
    """

    alpha: float
    beta: float
    points: tuple[Point, ...]

    def line(self, sent: float) -> float:
        """Returns the seconds by the line alone."""
        return self.alpha + self.beta * sent

    def seconds(self, sent: float) -> float:
        """Returns the seconds: between two measured sizes by the line through both, outside of all sizes by the fitted line.

        Few networks follow one line over six orders of magnitude: windows open, and protocols change with the size.
        """
        first, last = self.points[0], self.points[-1]
        if sent <= first.sent:
            return first.seconds
        if sent >= last.sent:
            return last.seconds + self._slope() * (sent - last.sent)
        return float(np.interp(sent, [p.sent for p in self.points], [p.seconds for p in self.points]))

    @property
    def errors(self) -> tuple[float, float]:
        """Returns the line's median and largest error, relative to the largest of line, time and spread of repetitions."""
        return float(np.median(self.each)), max(self.each)

    @property
    def each(self) -> list[float]:
        """Returns the error at each point."""
        return [abs(self.line(p.sent) - p.seconds) / max(self.line(p.sent), p.known) for p in self.points]

    def _slope(self) -> float:
        """Returns the seconds a byte beyond the largest size: the slope of the last two sizes, which have the widest windows.

        It is at most the slope from the first size to the last. If a protocol changes between the last two sizes, their times
        differ by more than the bytes explain, but two messages take no longer than twice one message.
        """
        if len(self.points) < 2:
            return self.beta
        first, before, last = self.points[0], *self.points[-2:]
        rises = ((last.seconds - p.seconds) / (last.sent - p.sent) for p in (first, before))
        return max(0.0, min(rises))


def fit(points: Sequence[Point]) -> Fit:
    """Returns the line with the least sum of relative errors; neither term is below 0.

    Errors are relative, because sizes span orders of magnitude. An error is relative to the larger of line and time, so that
    one message which took almost no time does not pull the line down to itself, and to at least the spread of a size's
    repetitions. As in least absolute deviations, the sum is least on a line through two points, so all such lines are tried.

    Raises:
        ValueError: for fewer than two different sizes, or times that are not above 0.

    References:
        Bloomfield and Steiger, 1983, Least Absolute Deviations (the line through two points, and what outliers do to it).
    """
    if any(not (p.seconds > 0 and math.isfinite(p.seconds)) for p in points):
        raise ValueError("times must be finite and above 0")
    ordered = tuple(_one(same) for _, same in itertools.groupby(sorted(points), key=lambda p: p.sent))
    if len(ordered) < 2:
        raise ValueError("a line needs points of at least two sizes")
    return min((Fit(alpha, beta, ordered) for alpha, beta in _lines(ordered)), key=lambda line: sum(line.each))


def _one(same: Iterable[Point]) -> Point:
    """Joins several measurements of one size into one point: with many workers, small sizes are padded to the same size."""
    sent, seconds, least, most = zip(*same, strict=True)
    return Point(sent[0], float(np.median(seconds)), min(least), max(most))


def _lines(points: Sequence[Point]) -> Iterator[tuple[float, float]]:
    """Yields the lines through any two points, and through any one point with either term 0."""
    for p in points:
        yield p.seconds, 0.0
        yield 0.0, p.seconds / p.sent
    for p, q in itertools.combinations(points, 2):
        if q.sent > p.sent:
            beta = (q.seconds - p.seconds) / (q.sent - p.sent)
            alpha = p.seconds - beta * p.sent
            if alpha >= 0 and beta >= 0:
                yield alpha, beta
