"""The log of decisions, and the centre that follows from it. It writes nothing: a follower is this alone.

What talks to a store here and in the modules beside this one is a generator: it yields requests and is given the answers, or a
:class:`~gradcomp_jax.islands.store.StoreError` where the store is away. Whoever runs it may stop it at any request.
"""

import dataclasses
from collections.abc import Generator
from typing import Any

from gradcomp_jax._errors import ExperimentError
from gradcomp_jax.islands import keys
from gradcomp_jax.islands.account import Code, norm_of
from gradcomp_jax.islands.keys import Name, digest
from gradcomp_jax.islands.objects import Configuration, Decision, NotOursError, Payload, from_json
from gradcomp_jax.islands.outer import OuterState, OuterStep, Vector
from gradcomp_jax.islands.store import Get, GetAll, Names, StoreError

Requests = Generator[Any, Any, Any]


class IslandError(ExperimentError):
    """Says that an island cannot take part, and what to do about it. Trying again would not help."""


@dataclasses.dataclass(frozen=True)
class Centre:
    """Holds the agreed parameters after a round.

    Attributes:
        round: the number of the round; 0 before the first.
        state: the centre and the momentum.
        digest: of the state.
    """

    round: int
    state: OuterState
    digest: str

    @classmethod
    def of(cls, number: int, state: OuterState) -> "Centre":
        """Returns the centre with its digest."""
        return cls(number, state, digest(*state.parts()))


class Log:
    """Follows the decisions of a run.

    Attributes:
        centre: the centre after the last decision that was applied; ``None`` before :meth:`begin`.
        recent: the last decisions.
        norms: norm over weight of the payloads of the last round.
        due: the last centre that is to be a snapshot, with its round's decision, until somebody takes it.
        start: digest of the first centre, which tells one run from another.
        read_bytes: bytes of payloads and snapshots that were read.
    """

    def __init__(self, configuration: Configuration | None, code: Code, island: str = "") -> None:
        """Takes what all islands have in common, ``None`` to take what the run has, their code, and whose log it is."""
        self.code, self.island = code, island
        self._compares = configuration is not None
        self._adopt(configuration or Configuration(code.size, code.digest))
        self.centre: Centre | None = None
        self.recent: dict[int, Decision] = {}
        self.norms: list[float] = []
        self.cache: dict[str, bytes] = {}
        self.due: tuple[Centre, Decision] | None = None
        self.read_bytes = 0
        self.start, self._configured = "", b""
        self._other_bits = 0

    def _adopt(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.outer = OuterStep(configuration.learning_rate, configuration.momentum, configuration.nesterov)

    def begin(self) -> Requests:
        """Compares configurations and takes the newest centre that can be checked; returns whether there is a run."""
        data = yield Get(keys.CONFIGURATION)
        if data is None:
            return False
        self._check(data)
        self._configured = data
        if self.centre is None:
            yield from self.jump()
        return self.centre is not None

    def present(self) -> Requests:
        """Makes sure that the store is still the run's: a disk may not be mounted, and its folder be empty, but writable."""
        self._is_there((yield Get(keys.CONFIGURATION)))

    def look(self) -> Requests:
        """Makes sure of that and applies all decisions that are there; one round trip if there is none."""
        if self.centre is None:
            yield from self.present()
            yield from self.follow()
            return
        number = self.centre.round + 1
        configuration, decision = yield GetAll((keys.CONFIGURATION, keys.round_key(number)))
        self._is_there(configuration)
        if decision is not None:
            yield from self.follow(read_decision(decision, number))

    def _is_there(self, configuration: bytes | None) -> None:
        if configuration != self._configured:
            raise StoreError("the run is not where it was")

    def _check(self, data: bytes) -> None:
        try:
            value = from_json(data, "configuration of islands")
            self.start = str(value.pop("centre", ""))
            configuration = Configuration.from_dict(value)
        except NotOursError as error:
            raise IslandError(
                f"{error}: name another folder or bucket, or use the version that began the run"
            ) from error
        own, theirs = self.configuration.to_dict(), configuration.to_dict()
        if not self._compares:
            own = {name: own[name] for name in ("size", "code")}
        if other := [f"{name} {theirs[name]}, not {own[name]}" for name in own if own[name] != theirs[name]]:
            raise IslandError(f"the run has {'; '.join(other)}: join with the same, or begin another run")
        self._adopt(configuration)

    @property
    def now(self) -> Centre:
        """Returns the centre, after :meth:`begin`."""
        if self.centre is None:
            raise StoreError("the run has no centre yet")
        return self.centre

    def decision(self, number: int) -> Requests:
        """Returns the decision of a round; ``None`` if it is not there."""
        if number in self.recent:
            return self.recent[number]
        data = yield Get(keys.round_key(number))
        return None if data is None else read_decision(data, number)

    def follow(self, decision: Decision | None = None, *, most: int | None = None) -> Requests:
        """Applies all decisions that are there, or the first ones of them.

        Args:
            decision: that of the next round, if it was read already.
            most: how many.
        """
        if self.centre is None:
            # It was given up, see _other.
            yield from self.jump()
        applied = 0
        while applied != most:
            now = self.now
            if decision is None and (decision := (yield from self.decision(now.round + 1))) is None:
                return
            if decision.before != now.digest:
                yield from self._other(decision)
            elif (payloads := (yield from self.payloads(decision))) is not None:
                self.apply(decision, payloads)
                applied += 1
            elif not (yield from self.jump()):
                # It is not visible yet.
                return
            decision = None

    def payloads(self, decision: Decision) -> Requests:
        """Returns the objects that a decision names, as they were when it was made; ``None`` if one is not there.

        An island's own payload is read from the store, even if it was before: until it is there, the island writes it again.
        """
        new = [e for e in decision.entries if e.digest not in self.cache or e.island == self.island]
        found = yield GetAll(tuple(keys.payload_key(e.island, decision.round, e.digest) for e in new))
        for entry, data in zip(new, found, strict=True):
            if data is None or digest(data) != entry.digest:
                return None
            self.read_bytes += len(data)
            self.cache[entry.digest] = data
        return [self.cache[entry.digest] for entry in decision.entries]

    def apply(self, decision: Decision, payloads: list[bytes]) -> None:
        """Takes the outer step of a decision, in the order of its entries. Nothing is judged again.

        A living island that is not in the round counts as one that has not moved, with the mean weight of the others: islands
        that are in different rounds move the centre as far as in one.
        """
        now, weighted, norms = self.now, [], []
        for entry, data in zip(decision.entries, payloads, strict=True):
            try:
                message, outer_gradient = opened(self.configuration, self.code, decision.round, entry.island, data)
            except ValueError:
                # What the bytes are is the same for everybody: nobody can take a step along these.
                continue
            weighted.append((message.weight, outer_gradient))
            norms.append(norm_of(outer_gradient) / message.weight)
        self.norms = norms or self.norms
        absent = len({*decision.members, *(entry.island for entry in decision.entries)}) - len(weighted)
        mean = sum(weight for weight, _ in weighted) / max(1, len(weighted))
        self._take(Centre.of(decision.round, self.outer(now.state, weighted, absent * mean)))
        self.recent[decision.round] = decision
        self.recent.pop(decision.round - 3, None)
        if decision.round % self.configuration.snapshot_every == 0:
            self.due = self.now, decision

    def _take(self, centre: Centre) -> None:
        self.centre = centre
        self.cache.clear()

    def _other(self, decision: Decision) -> Requests:
        """Computes the centre again, from a snapshot, where a decision is of another one."""
        if self._other_bits == decision.round:
            raise IslandError(
                f"round {decision.round} was decided on a centre with other bits than this machine computes from the same"
                " payloads: use a code whose decoded numbers are the same on all machines, such as block_quantized or topk"
            )
        self._other_bits, self.centre = decision.round, None
        if not (yield from self.jump(at_most=decision.round - 1)):
            raise StoreError("no snapshot is visible")

    def checked(self, *, at_most: int | None = None) -> Requests:
        """Returns the snapshots that the next round's decision, or the configuration, confirms: the newest first."""
        names = yield Names(keys.CENTRES)
        size = 4 * self.configuration.size * (2 if self.configuration.momentum else 1)
        right = [name for key, n in names.items() if (name := keys.read_centre_key(key)) and n == size]
        found = []
        for name in sorted(right, key=lambda name: -name.round):
            if at_most is not None and name.round > at_most:
                continue
            if name.round == 0:
                confirmed = name.digest == self.start
            else:
                decision = yield from self.decision(name.round + 1)
                confirmed = decision is not None and decision.before == name.digest
            if confirmed:
                found.append(name)
        return found

    def jump(self, *, at_most: int | None = None) -> Requests:
        """Takes the newest snapshot that is newer than the centre; returns whether it did."""
        snapshots: list[Name] = yield from self.checked(at_most=at_most)
        for name in snapshots:
            if self.centre is not None and name.round <= self.centre.round:
                break
            data = yield Get(name.key)
            if data is not None and digest(data) == name.digest:
                self.read_bytes += len(data)
                state = OuterState.from_bytes(data, self.configuration.size)
                self._take(Centre(name.round, state, name.digest))
                return True
        return False


def read_decision(data: bytes, number: int) -> Decision:
    """Returns the decision of a round that an object is.

    Raises:
        IslandError: if it is none, or of another round.
    """
    try:
        decision = Decision.from_bytes(data)
        if decision.round != number:
            raise NotOursError(f"it is of round {decision.round}")
    except NotOursError as error:
        raise IslandError(
            f"{keys.round_key(number)} is no decision of this run ({error}): begin another run"
        ) from error
    return decision


def opened(configuration: Configuration, code: Code, number: int, island: str, data: bytes) -> tuple[Payload, Vector]:
    """Returns a payload and what it decodes to.

    Raises:
        ValueError: if it is not of this run, this round and this island, or its code or its weight is not one.
    """
    message = Payload.from_bytes(data)
    if (message.configuration, message.round, message.island) != (configuration.digest, number, island):
        raise NotOursError("it is of another run, round or island")
    least, most = configuration.weights
    if not least <= message.weight <= most:
        raise NotOursError(f"its weight {message.weight} is not within {least} and {most}")
    return message, code.decode(message.body)
