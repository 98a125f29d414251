"""What is left of the throughput over each link, by strategy, and whether the aim is reached."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.sweep import links
from benchmarks.world.strategies import GOODPUT
from benchmarks.world.workers import Workers
from gradcomp_jax import _markdown

Link = tuple[float | None, float]
FREE: Link = (None, 0.0)
SLOW: Link = (20e6, 0.09)
AIM = 0.9
"""Of its unshaped throughput, which a streaming or sparse strategy must keep over the slow link."""
LOW = ("streaming DiLoCo int4, H = 100", "SparseLoCo, H = 30")


class Run:
    """Steps of one team with one strategy, numbered on from link to link."""

    def __init__(self, team: Workers, name: str) -> None:
        self._team, self.strategy = team, GOODPUT[name]
        team.order("begin", name)
        self.done = 0
        # All programs are compiled when every part has had its turn and its mean has arrived.
        self.stretch(self.strategy.period + self.strategy.delay + 1, 1)

    def stretch(self, count: int, parts: int) -> list[float]:
        """Seconds of each part."""
        first, self.done = self.done, self.done + count * parts
        return self._team.stretch(first, count, parts)

    def warm_up(self) -> float:
        """Steps after a change of the link, until what is in flight has departed over it; returns the seconds of one."""
        count = max(2 * self.strategy.delay, 2)
        return self.stretch(count, 1)[0] / count

    def measure(self, rounds: int, seconds: float) -> list[float]:
        """Seconds of a step in each round: the whole periods that take about ``seconds``, one at least."""
        period = self.strategy.period
        count = period * max(1, round(seconds / (self.warm_up() * period)))
        return [taken / count for taken in self.stretch(count, rounds)]


def in_order(chosen: Sequence[Link]) -> list[Link]:
    """Links from those that hold much in flight to those that hold little, and those without a delay last.

    TCP remembers what it could send over a slower link (:func:`benchmarks.sweep.links.in_order`).
    """
    rates, delays = ({link[i]: None for link in chosen} for i in range(2))
    return [link for link in links.in_order(list(rates), list(delays)) if link in chosen]


def pending(results: Mapping[str, Any], name: str, chosen: Sequence[Link]) -> list[Link]:
    """The links over which a strategy has not been measured."""
    done = {(c["strategy"], c["rate"], c["delay_s"]) for c in results["cells"]}
    return [link for link in chosen if (name, *link) not in done]


def table(results: Mapping[str, Any]) -> list[str]:
    """Examples a second of all workers, and the fraction of the same strategy's over a link without limits."""
    cells = {(c["strategy"], c["rate"], c["delay_s"]): c["steps_s"] for c in results["cells"]}
    # Unshaped links first, then from fast to slow.
    places = sorted({(c["rate"], c["delay_s"]) for c in results["cells"]}, key=lambda p: (-(p[0] or 1e15), p[1]))
    examples = results["workers"] * results["batch"]
    rows = []
    for name in dict.fromkeys(c["strategy"] for c in results["cells"]):
        row = [name]
        for place in places:
            taken = cells.get((name, *place))
            row.append("" if taken is None else _cell(taken, examples, kept(cells, name, place)))
        rows.append(row)
    head = [f"{links.rate_name(rate)}, {links.delay_name(delay_s)}" for rate, delay_s in places]
    return _markdown.table(("strategy", *head), rows, align="lr")


def kept(cells: Mapping[tuple, Sequence[float]], name: str, place: Link) -> float | None:
    """The fraction of the unshaped throughput, of the medians; ``None`` for the unshaped link itself, and without one."""
    free, taken = cells.get((name, *FREE)), cells.get((name, *place))
    return None if place == FREE or not free or not taken else statistics.median(free) / statistics.median(taken)


def aim(results: Mapping[str, Any]) -> str:
    """Whether the aim is reached, with the numbers."""
    cells = {(c["strategy"], c["rate"], c["delay_s"]): c["steps_s"] for c in results["cells"]}
    found = {name: share for name in LOW if (share := kept(cells, name, SLOW)) is not None}
    where = f"{links.rate_name(SLOW[0])} and {links.delay_name(SLOW[1])}"
    claim = f"At {where} a streaming or sparse strategy keeps at least {AIM:.0%} of its unshaped throughput"
    if not found:
        return f"{claim}: not measured."
    numbers = ", ".join(f"{name} {share:.1%}" for name, share in found.items())
    return f"{claim}: **{'pass' if max(found.values()) >= AIM else 'fail'}** ({numbers})."


def _cell(taken: Sequence[float], examples: int, share: float | None) -> str:
    rates = [examples / s for s in taken]
    text = f"{statistics.median(rates):,.0f}/s ({min(rates):,.0f} .. {max(rates):,.0f})"
    return text if share is None else f"{text}, {share:.0%}"
