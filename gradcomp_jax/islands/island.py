"""An island: a loop that talks to the store and to its own disk, and what its training says to it in between."""

import dataclasses
import secrets
from collections.abc import Callable

import numpy as np

from gradcomp_jax.islands import keys
from gradcomp_jax.islands.account import Account, Code, Record, norm_of
from gradcomp_jax.islands.deciding import Deciding
from gradcomp_jax.islands.keeping import Keeping
from gradcomp_jax.islands.living import Living
from gradcomp_jax.islands.log import Centre, IslandError, Log, Requests
from gradcomp_jax.islands.objects import Configuration, Payload, to_json
from gradcomp_jax.islands.outer import Vector
from gradcomp_jax.islands.store import Create, Delete, Get, Names, StoreError


@dataclasses.dataclass(frozen=True)
class Keep:
    """Asks to write this island's record to its own disk."""

    data: bytes


@dataclasses.dataclass(frozen=True)
class Wait:
    """Asks to wait for some seconds, or until the island has something to send."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class Status:
    """Counts what an island did.

    Attributes:
        round: the last round that was applied.
        accepted: rounds that accepted this island's payload.
        late: rounds that did not.
        bytes_written: of payloads.
        bytes_read: of payloads and snapshots.
        kept_norm: norm of the residual.
        away: errors of the store in a row; 0 while it answers.
    """

    round: int
    accepted: int
    late: int
    bytes_written: int
    bytes_read: int
    kept_norm: float
    away: int


class Island:
    """Takes part in the rounds of a run.

    :meth:`run` is the exchange, and is run in a thread of its own; :meth:`depart` and :meth:`land` are what training calls.
    Each side only replaces whole objects that the other reads, so neither ever waits for the other.
    """

    def __init__(
        self,
        name: str,
        configuration: Configuration,
        code: Code,
        *,
        clock: Callable[[], float],
        record: bytes | None = None,
        initial: Vector | None = None,
        decay: float = 1.0,
        poll: float = 1.0,
    ) -> None:
        """Begins, or goes on from its record.

        Args:
            name: its name, which no other island has.
            configuration: what all islands have in common.
            code: encodes payloads.
            clock: seconds, which only this process reads.
            record: what it wrote to its own disk last.
            initial: the parameters, if it may found the run.
            decay: of the residual.
            poll: seconds between two looks at the store.
        """
        self.name, self.configuration, self.code = keys.check_island(name), configuration, code
        self.error: Exception | None = None
        self._initial, self._decay, self._poll = initial, decay, poll
        self.progress = np.zeros(0, np.float32)
        old = None if record is None else Record.from_bytes(record)
        if old is not None and (old.island, old.configuration) != (name, configuration.digest):
            if old.start or old.wrote:
                raise IslandError(
                    f"the record is of island {old.island} in another run: name another folder for records"
                )
            # It was refused by a run, for its settings perhaps, and holds nothing.
            old = None
        if old is None:
            self.account = Account(np.zeros(configuration.size, np.float32))
            self._token, wrote, self._missed, self._start = secrets.token_hex(16), dict[str, str](), 0, ""
        else:
            self.account, self.progress = old.account(code), old.progress
            self._token, wrote, self._missed, self._start = old.token, old.wrote, old.missed, old.start
        self.log = Log(configuration, code, name)
        self.living = Living(name, configuration.patience, clock)
        self.deciding = Deciding(self.log, name, clock)
        self.keeping = Keeping(self.log, name, wrote, self._keep)
        self._latest: Centre | None = None
        self._asked: tuple[Vector, float] | None = None
        self._landed, self._delivered, self._leaving = -1, False, False
        # Names in the record on the disk; None without one.
        self._recorded = None if old is None else set(wrote)
        self._hurry = self.account.flight is None and bool(np.any(self.account.kept))
        self._accepted = self._late = self._written = self._away = 0
        self._kept_norm = norm_of(self.account.kept)

    # What training calls, between two of its steps.

    @property
    def status(self) -> Status:
        """Returns what it has done so far."""
        number = self._latest.round if self._latest else 0
        read, kept = self.log.read_bytes, self._kept_norm
        return Status(number, self._accepted, self._late, self._written, read, kept, self._away)

    @property
    def ready(self) -> bool:
        """Returns whether it has found its place in the run, so that its record is worth more than the one before."""
        return self._latest is not None

    @property
    def has_landing(self) -> bool:
        """Returns whether there is a centre that training has not taken."""
        return self._latest is not None and self._latest.round > self._landed

    def may_depart(self, steps: int, every: int) -> bool:
        """Returns whether a payload may leave now: ``every`` steps after the last one, or at once if that was not accepted."""
        free = self._asked is None and self.account.flight is None and self._landed >= 0 and not self.has_landing
        return free and (steps >= every or self._hurry)

    def depart(self, progress: Vector, weight: float) -> None:
        """Hands over base minus parameters; from now on the parameters are the base."""
        self._hurry = False
        self._asked = (progress, float(np.float32(weight)))

    def land(self) -> Vector | None:
        """Returns the newest centre, if training has not taken it: ``x <- centre + (x - base)``, and the centre is the base."""
        latest = self._latest
        if latest is None or latest.round <= self._landed:
            return None
        self._landed = latest.round
        return latest.state.centre

    def put_aside(self, progress: Vector | None) -> None:
        """Puts progress since the last departure into the record, ``None`` if it is not known.

        What was handed over and not encoded is added to it. What the record had before stays if there is neither.
        """
        if self._asked is not None:
            asked, self._asked = self._asked[0], None
            progress = asked if progress is None else asked + progress
        if progress is not None:
            self.progress = progress

    def leave(self) -> None:
        """Asks the loop to send nothing more, and to end once nothing is under way."""
        self._leaving = True

    # The loop.

    def run(self) -> Requests:
        """Takes part until :meth:`leave`; yields requests and is given their answers."""
        wait = self._poll
        begun = False
        while True:
            try:
                if not begun:
                    yield from self._begin()
                    begun = True
                if (yield from self._turn()):
                    yield Delete(keys.alive_key(self.name))
                    return
                wait, self._away = self._poll, 0
            except StoreError:
                self.living.lost()
                self._away += 1
                # Those whom the store was away from come back within one grace window, and so into one round.
                wait = min(2 * wait, max(self._poll, self.configuration.grace / 2))
            yield Wait(wait)

    def _begin(self) -> Requests:
        """Shows the configuration and the name to be the run's and this island's, and takes the centre."""
        yield from self._keep()
        if not (yield from self.log.begin()):
            if self._initial is None or self._start:
                raise StoreError("there is no run here" + " any more" * bool(self._start))
            yield from self._found(self._initial)
            if not (yield from self.log.begin()):
                raise StoreError("the run is not visible yet")
        if self._start and self._start != self.log.start:
            raise IslandError(
                "the record of this island is of a run that began otherwise: name another folder for records"
            )
        if not self._start:
            self._start, self._recorded = self.log.start, None
            yield from self._keep()
        token = self._token.encode()
        yield Create(keys.owner_key(self.name), token)
        owner = yield Get(keys.owner_key(self.name))
        if owner is None:
            raise StoreError("the owner of the name is not visible yet")
        if owner != token:
            raise IslandError(
                f"an island {self.name} is in this run already: choose another name, or give it the folder of its records"
            )

    def _found(self, initial: Vector) -> Requests:
        """Writes the configuration where there is none, and the centre that it names before it."""
        foreign = [key for key in (yield Names("")) if key.partition("/")[0] not in keys.OURS]
        if foreign:
            listed = ", ".join(sorted(foreign)[:3]) + (", ..." if len(foreign) > 3 else "")
            raise IslandError(f"the place holds {listed} and no run: name a new or an empty folder, or another prefix")
        first = Centre.of(0, self.log.outer.init(initial))
        key = keys.centre_key(0, first.digest)
        self.keeping.wrote[key] = first.digest
        yield from self._keep()
        yield Create(key, first.state.to_bytes())
        yield Create(keys.CONFIGURATION, to_json(self.configuration.to_dict() | {"centre": first.digest}))

    def _turn(self) -> Requests:
        """Does all that there is to do now; returns whether the island has left."""
        yield from self.living.beat(self._missed)
        yield from self.log.look()
        yield from self._settle()
        yield from self._send()
        names = yield Names(keys.ISLANDS)
        flight = self.account.flight
        # What is not there is written again: it may have gone to another place, see Log.present.
        self._delivered = flight is not None and keys.payload_key(self.name, flight.round, flight.digest) in names
        living = yield from self.living.poll(names, self._missed)
        yield from self.deciding.poll(names, living)
        yield from self._settle()
        self._latest = self.log.centre
        yield from self.keeping.poll()
        return self._leaving and self._asked is None and self.account.flight is None

    def _settle(self) -> Requests:
        """Learns whether the payload under way was accepted, once its round is decided."""
        flight = self.account.flight
        if flight is None or flight.round > self.log.now.round:
            return
        decision = yield from self.log.decision(flight.round)
        if decision is None:
            raise StoreError(f"round {flight.round} is not visible yet")
        if self.account.settle(decision):
            self._accepted, self._missed = self._accepted + 1, 0
        else:
            self._late, self._missed, self._hurry = self._late + 1, self._missed + 1, True
            self._kept_norm = norm_of(self.account.kept)
            yield from self.keeping.delete(keys.payload_key(self.name, flight.round, flight.digest))

    def _send(self) -> Requests:
        """Encodes what was handed over; writes it to the own disk, and then to the store."""
        asked = self._asked
        if asked is not None and self.account.flight is None:
            # Training goes on meanwhile, and hands over nothing more until this is done.
            now, limit = self.log.now, self.configuration.norm_limit
            head = Payload(self.configuration.digest, now.round + 1, self.name, asked[1], now.digest, b"")
            # A payload that waited long is large. What the others would refuse goes out in parts.
            most = 0.5 * limit * float(np.median(self.log.norms)) * asked[1] if self.log.norms else None
            flight = self.account.depart(asked[0], asked[1], head, self.code, most=most or None, decay=self._decay)
            self.keeping.wrote[keys.payload_key(self.name, flight.round, flight.digest)] = flight.digest
            self.progress = np.zeros(0, np.float32)
            self._delivered, self._kept_norm = False, norm_of(self.account.kept)
            self._written += len(flight.message)
            self._asked = None
        yield from self._keep()
        flying = self.account.flight
        if flying is not None and not self._delivered:
            yield Create(keys.payload_key(self.name, flying.round, flying.digest), flying.message)
            self._delivered = True

    def _keep(self) -> Requests:
        """Writes the record, if there is none yet, or an object is about to be written that it does not name."""
        names = set(self.keeping.wrote)
        if self._recorded is None or not names <= self._recorded:
            yield Keep(self.record())
            self._recorded = names

    def record(self) -> bytes:
        """Returns the record of what it has now, with which another process goes on."""
        flight = self.account.flight
        return Record(
            self.name,
            self._token,
            self.configuration.digest,
            dict(self.keeping.wrote),
            self._missed,
            self._start,
            self.account.kept,
            flight.round if flight else 0,
            flight.message if flight else b"",
            self.progress,
        ).to_bytes()
