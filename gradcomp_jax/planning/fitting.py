"""A line through measured times, which outliers do not bend."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Point(NamedTuple):
    """What a collective took. Attributes: bytes that one device sends, seconds (median), least and most of them."""

    sent: float
    seconds: float
    least: float
    most: float

    @property
    def known(self) -> float:
        """The time, or how far the repetitions lie apart where that is more."""
        return max(self.seconds, self.most - self.least)


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
        """Seconds: between two measured sizes by a straight line through both, beyond the largest at the rate of the last.

        Few networks are a line over six orders of magnitude: windows open, and protocols change with the size. But what a
        single size took is no rule: a segment that is lost costs a timeout, and some collectives now send and receive at once
        and now do not. So a size's seconds a byte, beyond the time of the smallest, are the median of its own and its two
        neighbours'; and as two messages take no longer than twice as long as one, the largest takes no more than its share of
        the one before, nor do those beyond it.
        """
        sizes, times = [p.sent for p in self.points], self._steady
        if sent <= sizes[-1]:
            return float(np.interp(sent, sizes, times))
        rise = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        return times[-1] + min(max(0.0, rise), times[-1] / sizes[-1]) * (sent - sizes[-1])

    @property
    def errors(self) -> tuple[float, float]:
        """Of the line: the median and the largest, relative to the larger of it, the time and the spread of repetitions."""
        return float(np.median(self.each)), max(self.each)

    @property
    def each(self) -> list[float]:
        """The error at each point."""
        return [abs(self.line(p.sent) - p.seconds) / max(self.line(p.sent), p.known) for p in self.points]

    @functools.cached_property
    def _steady(self) -> list[float]:
        """Seconds at each size, single outliers left out."""
        first, *others = self.points
        each = [(p.seconds - first.seconds) / (p.sent - first.sent) for p in others]
        kept = [float(np.median(each[i - 1 : i + 2])) if 0 < i < len(each) - 1 else each[i] for i in range(len(each))]
        times = [first.seconds, *(first.seconds + y * (p.sent - first.sent) for y, p in zip(kept, others, strict=True))]
        before, last = self.points[-2:]
        return [*times[:-1], min(times[-1], times[-2] * last.sent / before.sent)]


def fit(points: Sequence[Point]) -> Fit:
    """The line with the least sum of relative errors; neither term is below 0.

    Relative, because sizes span orders of magnitude: to the larger of line and time, so that one message which took next to
    nothing does not pull the line down to itself, and to no less than the spread of a size's repetitions. The sum of absolute
    errors is least on a line through two of the points, as in least absolute deviations, so all of those are tried.

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
    """What several measurements of one size are together: small sizes of many workers are filled up to the same one."""
    sent, seconds, least, most = zip(*same, strict=True)
    return Point(sent[0], float(np.median(seconds)), min(least), max(most))


def _lines(points: Sequence[Point]) -> Iterator[tuple[float, float]]:
    """Through any two points, and with either term 0 through any one."""
    for p in points:
        yield p.seconds, 0.0
        yield 0.0, p.seconds / p.sent
    for p, q in itertools.combinations(points, 2):
        if q.sent > p.sent:
            beta = (q.seconds - p.seconds) / (q.sent - p.sent)
            alpha = p.seconds - beta * p.sent
            if alpha >= 0 and beta >= 0:
                yield alpha, beta
