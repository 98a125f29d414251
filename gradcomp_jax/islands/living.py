"""Who is alive: whose heartbeat counts on. No clock is compared with another machine's."""

import math
from collections.abc import Callable, Mapping

from gradcomp_jax.islands import keys
from gradcomp_jax.islands.log import Requests
from gradcomp_jax.islands.objects import NotOursError, from_json, to_json
from gradcomp_jax.islands.store import GetAll, Put

BEATS = 4
"""Heartbeats within the patience of the others."""


class Living:
    """Writes an island's heartbeat and reads the others'.

    An island is alive for ``patience`` seconds, on the reader's own clock, after its counter was last seen to change. Time in
    which the store was away does not count: the first that is back waits for the others.
    """

    def __init__(self, island: str, patience: float, clock: Callable[[], float]) -> None:
        """Takes an island, seconds, and a clock that only this process reads."""
        self.island, self.patience, self.clock = island, patience, clock
        self._count, self._missed, self._beaten, self._read = 0, 0, -math.inf, -math.inf
        self._seen: dict[str, tuple[bytes, float, int]] = {}
        self._lost: float | None = None

    def lost(self) -> None:
        """Says that the store did not answer: until it does, nobody's silence means anything."""
        self._lost = self.clock() if self._lost is None else self._lost

    def beat(self, missed: int) -> Requests:
        """Counts on, if it is time or there is news: ``missed`` is how many rounds in a row this island has missed."""
        if self.clock() - self._beaten >= self.patience / BEATS or missed != self._missed:
            yield Put(keys.alive_key(self.island), to_json({"count": self._count, "missed": missed}))
            self._count, self._beaten, self._missed = self._count + 1, self.clock(), missed

    def poll(self, names: Mapping[str, int], missed: int) -> Requests:
        """Reads the heartbeats, if it is time; returns who is alive, with the rounds in a row that each has missed.

        Args:
            names: the keys below ``island``.
            missed: rounds in a row that this island has missed.
        """
        found = {island for key in names if (island := keys.read_alive_key(key))}
        if self._lost is not None:
            away, self._lost = self.clock() - self._lost, None
            self._seen = {name: (data, at + away, lacking) for name, (data, at, lacking) in self._seen.items()}
        if self.clock() - self._read >= self.patience / BEATS:
            others = sorted(found - {self.island})
            beats = yield GetAll(tuple(map(keys.alive_key, others)))
            for island, data in zip(others, beats, strict=True):
                if data is not None and data != self._seen.get(island, (b"",))[0]:
                    self._seen[island] = (data, self.clock(), _missed_by(data))
            self._read = self.clock()
        living = {
            island: lacking
            for island, (_, at, lacking) in self._seen.items()
            if island in found and self.clock() - at < self.patience
        }
        return living | {self.island: missed}


def _missed_by(data: bytes) -> int:
    """Returns what a heartbeat says; nothing that others write there can do harm."""
    try:
        return max(0, int(from_json(data, "heartbeat").get("missed", 0)))
    except (NotOursError, TypeError, ValueError, OverflowError):
        return 0
