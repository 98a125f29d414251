"""Islands in one thread, under a scheduler that is seeded and a store and disks with faults.

Every request of an island is an event of its own, so that those of others come between any two. A request may be refused, done
with its answer lost, done later, or answered from the past. An island may crash before or after each of them, and begins again
from what is on its disk.
"""

import dataclasses
import json
import random

import numpy as np

from gradcomp_jax.islands import keys
from gradcomp_jax.islands.account import Flight
from gradcomp_jax.islands.island import Island, Keep, Wait
from gradcomp_jax.islands.keys import digest
from gradcomp_jax.islands.log import Log
from gradcomp_jax.islands.objects import Decision, Payload
from gradcomp_jax.islands.store import Create, Delete, Get, GetAll, MemoryStore, Names, Put, StoreError

SIZE = 6


class HalfCode:
    """Sends the larger half of the entries, so that something is kept."""

    digest, size = "half", SIZE

    def encode(self, vector, seed):
        out = np.zeros(SIZE, np.float32)
        places = np.argsort(-np.abs(vector), kind="stable")[: SIZE // 2]
        out[places] = vector[places]
        return out.tobytes()

    def decode(self, data):
        if len(data) != 4 * SIZE:
            raise ValueError(f"{len(data)} bytes")
        vector = np.frombuffer(data, np.float32)
        if not np.isfinite(vector).all():
            raise ValueError("not finite")
        return vector


@dataclasses.dataclass(frozen=True)
class Faults:
    """Probabilities of each fault at one request."""

    refused: float = 0.0
    answer_lost: float = 0.0
    done_later: float = 0.0
    stale: float = 0.0
    slow: float = 0.0
    crash: float = 0.0


class Timeline:
    """A store with a memory of its past, which refuses what no store of a run may be asked."""

    def __init__(self):
        self.past = {}  # key -> [(time, data or None, writer)]
        self.deleted = []  # (time, key, writer)

    def at(self, key, time):
        found = None
        for when, data, _ in self.past.get(key, ()):
            if when <= time:
                found = data
        return found

    def names(self, folder, time):
        return {
            key: len(data)
            for key in self.past
            if (not folder or key.startswith(folder + "/")) and (data := self.at(key, time)) is not None
        }

    def write(self, key, data, time, writer):
        self.past.setdefault(key, []).append((time, data, writer))

    def perform(self, request, time, writer):
        match request:
            case Create(key, data):
                absent = self.at(key, time) is None
                if absent:
                    if key.startswith(keys.ROUNDS + "/"):
                        assert key not in self.past, "a decision was made twice"
                    self.write(key, data, time, writer)
                return absent
            case Put(key, data):
                assert key == keys.alive_key(writer), f"{writer} overwrites {key}"
                self.write(key, data, time, writer)
            case Delete(key):
                if self.at(key, time) is not None:
                    self.check_deletion(key, time, writer)
                    self.write(key, None, time, writer)
                    self.deleted.append((time, key, writer))
            case Get(key):
                return self.at(key, time)
            case Names(folder):
                return self.names(folder, time)

    def check_deletion(self, key, time, writer):
        """Only what is the writer's own, and superfluous."""
        if key == keys.alive_key(writer):
            return
        asked_by = {who for _, data, who in self.past[key] if data is not None}
        payload, centre = keys.read_payload_key(key), keys.read_centre_key(key)
        assert payload or centre, f"{writer} deletes {key}"
        number = (payload or centre).round
        if payload:
            assert asked_by == {writer} and payload.island == writer, f"{writer} deletes {key} of {asked_by}"
            decision = self.at(keys.round_key(number), time)
            if decision is not None and not Decision.from_bytes(decision).accepts(writer, payload.digest):
                return
        later = [c for c in self.confirmed(time) if c.round >= number + bool(centre)]
        assert len(later) >= 2, f"{writer} deletes {key}, and of later snapshots there are {len(later)}"

    def confirmed(self, time):
        for key in self.names(keys.CENTRES, time):
            name = keys.read_centre_key(key)
            after = name and self.at(keys.round_key(name.round + 1), time)
            if after and Decision.from_bytes(after).before == name.digest == digest(self.at(key, time)):
                yield name

    def decisions(self):
        found = []
        while (key := keys.round_key(len(found) + 1)) in self.past:
            found.append(Decision.from_bytes(self.past[key][0][1]))
        assert len(found) == sum(key.startswith(keys.ROUNDS + "/0") for key in self.past)
        return found


class Actor:
    """An island with its disk and its training, or a follower."""

    def __init__(self, world, name, *, born=0.0, weight=1.0, every=3, pace=1.0, rate=1.0, leaves=None, founds=True):
        self.world, self.name, self.weight, self.every, self.pace, self.rate = world, name, weight, every, pace, rate
        self.wake, self.leaves, self.founds = born, leaves, founds
        self.disk, self.disk_seen = None, np.zeros(SIZE)
        self.crashes = 0
        self.island = None
        self.gone, self.watched, self.joined = False, None, False

    # A process.

    def start(self):
        rng = self.world.rng
        # A later founder would begin elsewhere.
        initial = np.float32(rng.normal(size=SIZE)) if self.founds else None
        self.island = Island(
            self.name,
            self.world.configuration,
            HalfCode(),
            clock=lambda: self.world.time * self.rate,
            record=self.disk,
            initial=initial,
            poll=0.5,
        )
        self.loop, self.answer, self.request = self.island.run(), None, None
        self.x = self.base = None
        self.seen = self.disk_seen.copy()
        self.handed = self.encoded = self.seen.copy()
        self.steps = 0
        self.next_step = self.world.time

    def crash(self):
        self.loop.close()
        self.island, self.crashes = None, self.crashes + 1
        self.wake = self.world.time + self.world.rng.exponential(8.0)

    def advance(self):
        """Takes the answer, and goes on to the next request, which is done now or later."""
        world = self.world
        if self.island is None:
            self.start()
        try:
            answer, self.answer = self.answer, None
            if isinstance(answer, Exception):
                self.request = self.loop.throw(answer)
            else:
                self.request = self.loop.send(answer)
        except StopIteration:
            self.gone, self.wake = True, np.inf
            return
        if self.island._asked is None:
            self.encoded = self.handed
        self.watch(self.island.log)
        rng, faults, request = world.rng, world.faults, self.request
        if isinstance(request, Wait):
            self.wake = world.time + request.seconds / self.rate
            return
        self.wake = world.time + rng.exponential(4.0 if rng.random() < faults.slow else 0.05)
        if rng.random() < faults.crash / 2:
            self.crash()
            return
        if isinstance(request, Keep):
            self.disk, self.disk_seen = request.data, self.encoded.copy()
        else:
            self.answer = world.perform(request, self)
        if rng.random() < faults.crash / 2:
            self.crash()

    def watch(self, log):
        if log.centre is not None and log.centre is not self.watched:
            self.watched = log.centre
            self.joined = self.island is not None and self.island._latest is not None
            known = self.world.centres.setdefault(log.centre.round, log.centre.digest)
            assert known == log.centre.digest, f"{self.name} has another centre after round {log.centre.round}"
            assert digest(log.centre.state.to_bytes()) == known

    # Its training.

    def train(self):
        island, rng = self.island, self.world.rng
        if island is None or self.gone:
            return
        if island.has_landing:
            centre = island.land()
            if self.x is None:
                self.x = centre.copy()
            else:
                self.x = centre + (self.x - self.base)
            self.base = centre
        if self.x is None:
            return
        move = np.float32(rng.normal(size=SIZE))
        before, self.x = self.x, self.x - move
        self.seen = self.seen + self.weight * (before.astype(np.float64) - self.x)
        self.steps += 1
        if island.may_depart(self.steps, self.every) and not island._leaving:
            island.depart(self.base - self.x, self.weight)
            self.base, self.steps, self.handed = self.x.copy(), 0, self.seen.copy()
            if self.leaves is not None and self.world.time > self.leaves:
                island.leave()

    def check_law(self):
        """accepted + kept + in flight + weight x progress since departure = everything seen."""
        accepted = self.world.accepted(self.name)
        if self.island is None:
            return
        held = accepted + self.island.account.kept
        flight: Flight | None = self.island.account.flight
        if flight is not None and not self.world.is_accepted(flight):
            held = held + flight.sent
        if self.island._asked is not None:
            held = held + np.float64(self.weight) * self.island._asked[0]
        if self.x is not None:
            held = held + self.weight * (self.base.astype(np.float64) - self.x)
        error = np.abs(held - self.seen).max()
        assert error < 1e-3 * (1 + np.abs(self.seen).max()), f"{self.name} lost {held - self.seen}"


class Follower(Actor):
    """Reads, and writes nothing."""

    def start(self):
        self.log = Log(self.world.configuration, HalfCode())
        self.loop, self.answer = self.run(), None

    def run(self):
        begun = False
        while True:
            try:
                if not begun:
                    begun = yield from self.log.begin()
                if begun:
                    yield from self.log.follow()
            except StoreError:
                pass
            yield Wait(1.0)

    def advance(self):
        if not hasattr(self, "log"):
            self.start()
        answer, self.answer = self.answer, None
        request = self.loop.throw(answer) if isinstance(answer, Exception) else self.loop.send(answer)
        self.watch(self.log)
        self.wake = self.world.time + self.world.rng.exponential(0.2)
        if not isinstance(request, Wait):
            assert isinstance(request, (Get, GetAll, Names)), "a follower writes"
            self.answer = self.world.perform(request, self)

    def train(self):
        pass

    def check_law(self):
        pass


class Rng(random.Random):
    """Python's generator, which is faster for single numbers, with NumPy's names."""

    def exponential(self, mean):
        return self.expovariate(1 / mean)

    def normal(self, size):
        return [self.gauss(0.0, 1.0) for _ in range(size)]


class World:
    """Runs actors over one store."""

    def __init__(self, seed, configuration, faults):
        self.rng, self.configuration, self.faults = Rng(seed), configuration, faults
        self.store, self.time, self.actors, self.centres = Timeline(), 0.0, [], {}
        self.cut = {}  # actor -> [(begin, end)] without the store
        self.unmounted = {}  # actor -> (begin, end) with an empty store in its place
        self.elsewhere = {}
        self.later = []  # (time, request, writer)
        self._sums = (0, {})

    def perform(self, request, actor):
        rng, faults = self.rng, self.faults
        if isinstance(request, GetAll):
            answers = [self.perform(Get(key), actor) for key in request.keys]
            return next((a for a in answers if isinstance(a, StoreError)), answers)
        if (
            any(begin <= self.time < end for begin, end in self.cut.get(actor.name, ()))
            or rng.random() < faults.refused
        ):
            return StoreError("refused")
        if isinstance(request, (Create, Put, Delete)) and rng.random() < faults.done_later:
            self.later.append((self.time + rng.exponential(3.0), request, actor.name))
            return StoreError("no answer in time")
        begin, end = self.unmounted.get(actor.name, (0.0, 0.0))
        if begin <= self.time < end and actor.joined:
            return self.elsewhere.setdefault(actor.name, MemoryStore()).perform(request)
        time = self.time
        if isinstance(request, (Get, Names)) and rng.random() < faults.stale:
            time -= rng.exponential(3.0)
        answer = self.store.perform(request, time, actor.name)
        return StoreError("the answer was lost") if rng.random() < faults.answer_lost else answer

    def run(self, until):
        """Takes events in the order of their times."""
        n = 0
        while True:
            actor = min(self.actors, key=lambda a: a.wake)
            if actor.wake > until:
                self.time = until
                return
            self.time = max(self.time, actor.wake)
            for late in [late for late in self.later if late[0] <= self.time]:
                self.later.remove(late)
                self.store.perform(late[1], self.time, late[2])
            actor.advance()
            for other in self.actors:
                if other.island is not None and self.time >= other.next_step:
                    other.train()
                    other.next_step = self.time + self.rng.exponential(other.pace)
            n += 1
            if n % 7 == 0:
                self.rng.choice(self.actors).check_law()

    # What is true, whatever an island believes.

    def accepted(self, name):
        count, sums = self._sums
        while (key := keys.round_key(count + 1)) in self.store.past:
            count += 1
            for entry in Decision.from_bytes(self.store.past[key][0][1]).entries:
                sent = HalfCode().decode(self.object_of(entry, count, anywhere=True).body)
                sums[entry.island] = sums.get(entry.island, np.zeros(SIZE)) + sent
        self._sums = count, sums
        return sums.get(name, np.zeros(SIZE))

    def object_of(self, entry, number, *, anywhere=False):
        """The payload that a decision names. It may have been judged in an empty store, and comes to the right one later."""
        key = keys.payload_key(entry.island, number, entry.digest)
        if anywhere and key not in self.store.past:
            data = next(store.objects[key] for store in self.elsewhere.values() if key in store.objects)
        else:
            data = self.store.past[key][0][1]
        assert digest(data) == entry.digest and len(data) == entry.size
        return Payload.from_bytes(data)

    def is_accepted(self, flight):
        found = self.store.past.get(keys.round_key(flight.round))
        return bool(found) and Decision.from_bytes(found[0][1]).accepts(flight.island, flight.digest)

    def replay(self):
        """Computes every centre anew, from all that was ever written."""
        first = json.loads(self.store.past[keys.CONFIGURATION][0][1])["centre"]
        numbers = np.frombuffer(self.store.past[keys.centre_key(0, first)][0][1], np.float32)
        c, m = numbers[:SIZE].copy(), numbers[SIZE:].copy()
        config, seen = self.configuration, set()
        for decision in self.store.decisions():
            assert decision.before == digest(c.tobytes(), m.tobytes()), f"round {decision.round}"
            # Whoever lives and is not in the round counts as not having moved.
            weights = {entry.island: entry.weight for entry in decision.entries}
            absent = sum(name not in weights for name in decision.members) * sum(weights.values()) / len(weights)
            total, weight = np.zeros(SIZE, np.float32), np.float32(absent)
            for entry in decision.entries:
                assert entry.digest not in seen, "a payload was accepted twice"
                seen.add(entry.digest)
                message = self.object_of(entry, decision.round)
                assert message.before == decision.before and message.island == entry.island
                total, weight = total + HalfCode().decode(message.body), weight + np.float32(message.weight)
            g = total / weight
            m = g + np.float32(config.momentum) * m
            c = c + np.float32(-config.learning_rate) * (g + np.float32(config.momentum) * m)
            known = self.centres.get(decision.round)
            assert known in (None, digest(c.tobytes(), m.tobytes())), f"round {decision.round}"
        return c
