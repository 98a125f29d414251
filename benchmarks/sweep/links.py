"""Rates and delays as people write them, and the cells of the sweep."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

UNITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3, "bit": 1.0}
RATES = ("unshaped", "1Gbit", "100Mbit", "20Mbit")
DELAYS = ("0ms", "25ms", "90ms")


@dataclasses.dataclass(frozen=True)
class Cell:
    """A model, a number of workers, and the links between them.

    Attributes:
        model: a name of ``tasks.TASKS``.
        workers: processes.
        rate: bits per second of each direction of a worker's link, or ``None``.
        delay_s: one way, seconds.
    """

    model: str
    workers: int
    rate: float | None
    delay_s: float

    @property
    def key(self) -> str:
        return f"{self.model}, {self.workers} workers, {rate_name(self.rate)}, {delay_name(self.delay_s)}"


def parse_rate(text: str) -> float | None:
    """Bits per second: ``100Mbit``, ``1Gbit/s``; ``None`` for ``unshaped``.

    Raises:
        ValueError: for anything else.
    """
    if text.lower() == "unshaped":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?bit)(?:/s)?", text.strip().lower())
    if found is None or not float(found[1]):
        raise ValueError(f"a rate is unshaped, or a number and one of kbit, Mbit, Gbit, such as 100Mbit; got {text!r}")
    return float(found[1]) * UNITS[found[2]]


def parse_delay(text: str) -> float:
    """Seconds, of ``25ms`` or ``0``.

    Raises:
        ValueError: for anything else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s)?", text.strip().lower())
    if found is None or (found[2] is None and float(found[1])):
        raise ValueError(f"a delay is a number and ms or s, such as 25ms; got {text!r}")
    return float(found[1]) / (1000 if found[2] == "ms" else 1)


def rate_name(rate: float | None) -> str:
    if rate is None:
        return "unshaped"
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate >= size:
            return f"{rate / size:g} {unit}"
    return f"{rate:g} bit/s"


def delay_name(delay_s: float) -> str:
    return f"{1000 * delay_s:g} ms"


def as_read(kept: Mapping[str, Any]) -> tuple[float, float]:
    """Sorts what was kept of links as a table has it, whatever the order in which they were measured."""
    return kept["delay_s"], -(kept["rate"] or float("inf"))


def cells(
    models: Sequence[str], workers: Sequence[int], rates: Sequence[float | None], delays: Sequence[float]
) -> Iterator[Cell]:
    """All of them; those that share processes, and so connections, follow each other as :func:`in_order` has them."""
    for model, n, (rate, delay) in itertools.product(models, workers, in_order(rates, delays)):
        yield Cell(model, n, rate, delay)


def in_order(rates: Sequence[float | None], delays: Sequence[float]) -> list[tuple[float | None, float]]:
    """Links, those that hold the most in flight first, by rate and delay, and those without a delay last.

    TCP remembers where it last lost a segment, and grows by little beyond: over 25 ms, after a link of 20 Mbit/s, it takes
    minutes to fill a fast one. A smaller window it finds within a step.
    """

    def key(link: tuple[float | None, float]) -> tuple[bool, float, float]:
        rate, delay = link
        # More than any link of the laboratory, and finite: unshaped links with a longer delay come first as well.
        most = rate or 1e15
        return delay == 0, -most * delay, -most

    return sorted(itertools.product(rates, delays), key=key)
