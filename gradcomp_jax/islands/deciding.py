"""Which payloads a round accepts, and when. Only what is in the store, and was read and checked, is named."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping

from gradcomp_jax.islands import keys
from gradcomp_jax.islands.account import norm_of
from gradcomp_jax.islands.keys import digest
from gradcomp_jax.islands.log import Log, Requests, opened
from gradcomp_jax.islands.objects import Decision, Entry
from gradcomp_jax.islands.store import Create, GetAll

_LARGEST_HEAD = 1 << 17
MOST_WINDOWS = 8
"""A round waits at most so many grace windows for an island that missed the rounds before."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Holds what is known of a payload that passed the checks of it alone.

    Attributes:
        entry: how a decision names it.
        norm: its norm, over its weight.
    """

    entry: Entry
    norm: float


def within_norms(candidates: Mapping[str, Candidate], limit: float) -> list[Candidate]:
    """Returns the candidates whose norm is at most ``limit`` times the median of the others', by island."""
    found = []
    for island, candidate in sorted(candidates.items()):
        others = [other.norm for name, other in candidates.items() if name != island]
        median = statistics.median(others) if others else 0.0
        if median == 0 or candidate.norm <= limit * median:
            found.append(candidate)
    return found


class Deciding:
    """Decides the next round, if it is the first to do so.

    Attributes:
        refused: payloads that did not pass, with the reason.
        candidates: payloads of the next round that did.
    """

    def __init__(self, log: Log, island: str, clock: Callable[[], float]) -> None:
        """Takes the log, who decides, and a clock that only this process reads."""
        self.log, self.island, self.clock = log, island, clock
        self.candidates: dict[str, Candidate] = {}
        self.refused: dict[str, str] = {}
        self._round, self._since = 0, 0.0

    def poll(self, names: Mapping[str, int], living: Mapping[str, int]) -> Requests:
        """Reads the payloads of the next round; once they are enough, and all are there or the window is over, decides.

        Args:
            names: the keys below ``island``.
            living: the islands that are alive, with the rounds in a row that each has missed.
        """
        now, log = self.log.now, self.log
        if self._round != now.round + 1:
            self._round, self._since = now.round + 1, self.clock()
            self.candidates, self.refused = {}, {}
        yield from self._read(names)
        accepted = within_norms(self.candidates, log.configuration.norm_limit)
        if len(accepted) < log.configuration.quorum:
            self._since = self.clock()
            return
        there = set(self.candidates) | {name.island for key in self.refused if (name := keys.read_payload_key(key))}
        missing = [missed for island, missed in living.items() if island not in there]
        windows = 1 + min(max(missing, default=0), MOST_WINDOWS - 1)
        if missing and self.clock() - self._since < windows * log.configuration.grace:
            return
        members = sorted(set(living) | {candidate.entry.island for candidate in accepted})
        entries = tuple(candidate.entry for candidate in accepted)
        decision = Decision(self._round, now.digest, entries, tuple(members), self.island)
        # Whether this one or another was first: the round's decision is the object that is there now.
        yield Create(keys.round_key(self._round), decision.to_bytes())
        yield from log.present()
        yield from log.follow(most=1)

    def _read(self, names: Mapping[str, int]) -> Requests:
        """Reads what is new for the round, all at once, and judges it."""
        new = list[keys.Name]()
        for key, size in sorted(names.items()):
            name = keys.read_payload_key(key)
            if not name or name.round != self._round or key in self.refused or name.island in self.candidates:
                continue
            if size > 8 * self.log.configuration.size + _LARGEST_HEAD:
                # No code makes so much of so few entries: nobody has to hold it in memory to refuse it.
                self.refused[key] = f"it has {size} bytes"
            else:
                new.append(name)
        if new:
            found = yield GetAll(tuple(name.key for name in new))
            for name, data in zip(new, found, strict=True):
                if data is not None and name.island not in self.candidates:
                    self._judge(name, names[name.key], data)

    def _judge(self, name: keys.Name, size: int, data: bytes) -> None:
        log = self.log
        log.read_bytes += len(data)
        try:
            if digest(data) != name.digest or len(data) != size:
                raise ValueError("its content is not what its name says")
            message, outer_gradient = opened(log.configuration, log.code, name.round, name.island, data)
            if message.before != log.now.digest:
                raise ValueError("it departed from another centre")
        except ValueError as error:
            self.refused[name.key] = str(error)
            return
        log.cache[name.digest] = data
        entry = Entry(name.island, message.weight, name.digest, len(data))
        self.candidates[name.island] = Candidate(entry, norm_of(outer_gradient) / message.weight)
