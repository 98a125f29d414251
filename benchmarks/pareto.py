"""Pictures of what methods give against what they send: every method a point, names for those that no other beats in both."""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, NullFormatter

from gradcomp_jax.cli.colours import COLOURS


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A method.

    Attributes:
      name: of the method.
      sent: bytes that a device sends in a step.
      low: lower end of its bar.
      mean: of its seeds.
      high: upper end of its bar.
    """

    name: str
    sent: float
    low: float
    mean: float
    high: float

    @classmethod
    def of(cls, name: str, sent: float, values: Sequence[float]) -> "Point":
        """Returns the point of some seeds, whose bar is one standard deviation."""
        mean, deviation = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
        return cls(name, sent, mean - deviation, mean, mean + deviation)


def frontier(points: Iterable[Point], *, more_is_better: bool) -> list[Point]:
    """Returns the points that no other beats in both bytes and mean, those that send least first."""
    sign = 1 if more_is_better else -1
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.sent, -sign * p.mean)):
        if not kept or sign * point.mean > sign * kept[-1].mean:
            kept.append(point)
    return kept


def draw(axes: Axes, series: Sequence[Sequence[Point]], *, more_is_better: bool, baselines: Sequence[str] = ()) -> None:
    """Draws points, a line through the frontier of each series, and the names of its methods and of the baselines."""
    points = [point for one in series for point in one]
    named = [p for p in points if p.name in baselines]
    for one, colour in zip(series, COLOURS[:1] + COLOURS[2:], strict=False):
        best = frontier(one, more_is_better=more_is_better)
        named += [p for p in best if p not in named]
        axes.plot([p.sent for p in best], [p.mean for p in best], color=colour, lw=1.2, alpha=0.6, zorder=1)
        for p in one:
            look = {"marker": "o", "markersize": 6, "capsize": 3, "lw": 1.2, "alpha": 1.0 if p in named else 0.35}
            bar = [[p.mean - p.low], [p.high - p.mean]]
            axes.errorbar(p.sent, p.mean, yerr=bar, color=COLOURS[1] if p.name in baselines else colour, **look)
    ends = min(p.sent for p in points), max(p.sent for p in points)
    low, high = min(p.low for p in points), max(p.high for p in points)
    _label(axes, sorted(named, key=lambda p: p.sent), (ends[1] / ends[0]) ** 0.16, upwards=more_is_better)
    room = 0.25 * (high - low)
    axes.set_ylim((low - room / 5, high + room) if more_is_better else (low - room, high + room / 5))
    axes.set(xscale="log", xlabel="bytes that one device sends in a step", xlim=(ends[0] / 1.7, ends[1] * 1.7))
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _label(axes: Axes, points: Sequence[Point], close: float, *, upwards: bool) -> None:
    """Puts names on the better side of the points, which is empty; of points that are close in bytes, at heights in turn."""
    height, last = 0, 0.0
    for p in points:
        height = (height + 1) % 5 if p.sent < last * close else 0
        last = p.sent
        axes.annotate(
            p.name,
            (p.sent, p.high if upwards else p.low),
            xytext=(0, (1 if upwards else -1) * (7 + 13 * height)),
            textcoords="offset points",
            ha="center",
            va="bottom" if upwards else "top",
            fontsize=8.5,
            arrowprops={"arrowstyle": "-", "color": "0.75", "lw": 0.6} if height else None,
        )
