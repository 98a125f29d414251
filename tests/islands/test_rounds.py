"""What a round names and what it refuses, what a damaged or foreign object does, and the objects themselves."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax.islands import keys
from gradcomp_jax.islands.account import Account, Record
from gradcomp_jax.islands.deciding import Candidate, within_norms
from gradcomp_jax.islands.island import Island, Keep, Wait
from gradcomp_jax.islands.keys import digest
from gradcomp_jax.islands.log import IslandError
from gradcomp_jax.islands.objects import Configuration, Decision, Entry, NotOursError, Payload, to_json
from gradcomp_jax.islands.store import MemoryStore, StoreError
from tests.islands.simulation import SIZE, HalfCode

CONFIGURATION = Configuration(size=SIZE, code="half", grace=0.0, quorum=1, snapshot_every=2, patience=8.0)


class Process:
    """An island, a step at a time, without faults."""

    def __init__(self, store, name="a", configuration=CONFIGURATION, record=None, code=None, initial=None):
        self.store, self.disk, self.time = store, record, 0.0
        self.island = Island(
            name,
            configuration,
            code or HalfCode(),
            clock=lambda: self.time,
            record=record,
            initial=np.zeros(SIZE, np.float32) if initial is None else initial,
            poll=1.0,
        )
        self.loop = self.island.run()

    def turn(self):
        """Runs until the loop waits."""
        answer = None
        while not isinstance(request := self.answered(answer), Wait):
            if isinstance(request, Keep):
                self.disk, answer = request.data, None
            else:
                try:
                    answer = self.store.perform(request)
                except StoreError as error:
                    answer = error
        self.time += request.seconds

    def answered(self, answer):
        return self.loop.throw(answer) if isinstance(answer, Exception) else self.loop.send(answer)

    def depart(self, progress, weight=1.0):
        self.island.land()
        assert self.island.may_depart(1, 1)
        self.island.depart(np.full(SIZE, progress, np.float32), weight)

    @property
    def refused(self):
        return list(self.island.deciding.refused.values())


def decisions(store):
    return [Decision.from_bytes(store.objects[key]) for key in sorted(store.objects) if key.startswith("round/")]


def forged(process, name="z", body=None, **changes):
    """A payload for the next round, well made but for the changes."""
    now = process.island.log.now
    body = np.ones(SIZE, np.float32).tobytes() if body is None else body
    payload = Payload(CONFIGURATION.digest, now.round + 1, name, 1.0, now.digest, body)
    data = dataclasses.replace(payload, **changes).to_bytes()
    process.store.create(keys.payload_key(name, now.round + 1, digest(data)), data)
    return data


@pytest.fixture
def two():
    store = MemoryStore()
    both = Process(store, "a"), Process(store, "b")
    for process in both:
        process.turn()
    return both


def test_two_islands_take_the_same_steps():
    store, patient = MemoryStore(), dataclasses.replace(CONFIGURATION, grace=5.0)
    a, b = (Process(store, name, patient) for name in "ab")
    for process in (a, b) * 3:
        # They have to see each other first.
        process.turn()
    for number in range(1, 8):
        a.depart(0.5)
        b.depart(-2.0, 3.0)
        for process in (a, b, a):
            process.turn()
        assert a.island.log.now.digest == b.island.log.now.digest
        assert a.island.log.now.round == number
    assert all([e.island for e in d.entries] == ["a", "b"] for d in decisions(a.store))
    assert a.island.status.accepted == 7


class Away(MemoryStore):
    """Is away while it is told to be."""

    away = False

    def perform(self, request):
        if self.away:
            raise StoreError("no route to host")
        return super().perform(request)


@pytest.mark.parametrize("away", [True, False])
def test_after_the_store_was_away_the_first_that_is_back_waits_for_the_others(away):
    store, patient = Away(), dataclasses.replace(CONFIGURATION, grace=1000.0)
    a, b = (Process(store, name, patient) for name in "ab")
    for process in (a, b) * 3:
        process.turn()
    a.depart(0.5)
    b.depart(-2.0)
    store.away = away
    until = a.time + 5 * CONFIGURATION.patience
    while a.time < until:
        a.turn()
    b.time, store.away = a.time, False
    a.turn()
    # Where the store answered all the time, b has been silent for too long.
    assert [[e.island for e in d.entries] for d in decisions(store)] == ([] if away else [["a"]])
    if away:
        for process in (b, a):
            process.turn()
        assert [[e.island for e in d.entries] for d in decisions(store)] == [["a", "b"]]


class WholeCode(HalfCode):
    """Sends everything."""

    digest = "whole"

    def encode(self, vector, seed):
        return vector.tobytes()


@pytest.mark.parametrize("together", [True, False])
def test_islands_in_different_rounds_move_the_centre_as_far_as_in_one(together):
    settings = {"grace": 1000.0 if together else 0.0, "learning_rate": 1.0, "momentum": 0.0}
    configuration = dataclasses.replace(CONFIGURATION, code="whole", **settings)
    store = MemoryStore()
    a, b = (Process(store, name, configuration, code=WholeCode()) for name in "ab")
    for process in (a, b) * 3:
        process.turn()
    a.depart(0.5)
    b.depart(-2.0)
    for process in (a, b, a):
        process.turn()
    assert [[e.island for e in d.entries] for d in decisions(store)] == ([["a", "b"]] if together else [["a"], ["b"]])
    np.testing.assert_allclose(a.island.log.now.state.centre, 0.75, rtol=1e-6)
    assert a.island.log.now.digest == b.island.log.now.digest


def test_islands_that_wait_for_each_round_are_diloco():
    """Nobody late, nothing lost by a code, no step while a payload is under way: then it is ``gc.diloco`` with ``dense``."""
    every, rounds, n = 5, 8, 3
    goals = np.random.default_rng(0).normal(size=(n, SIZE)).astype(np.float32)
    start = np.random.default_rng(1).normal(size=SIZE).astype(np.float32)

    def local(x, goal):
        return -0.1 * (x - goal)

    tx = gc.diloco(gc.dense(axis_name="i"), axis_name="i", every=every, learning_rate=0.7, momentum=0.9)

    def replica(goal):
        state, x, centres = tx.init(start), jnp.asarray(start), []
        for _ in range(rounds * every):
            updates, state = tx.update(local(x, goal), state, x)
            x = x + updates
            centres.append(state.centre)
        return jnp.stack(centres[every - 1 :: every])

    expected = np.asarray(jax.jit(jax.vmap(replica, axis_name="i"))(goals))[0]
    store = MemoryStore()
    config = dataclasses.replace(CONFIGURATION, code="whole", quorum=n, grace=100.0, learning_rate=0.7, momentum=0.9)
    islands = [Process(store, name, config, code=WholeCode(), initial=start) for name in "abc"]
    for process in islands * 3:
        process.turn()
    x = [process.island.land() for process in islands]
    for number in range(rounds):
        base = list(x)
        for i, process in enumerate(islands):
            for _ in range(every):
                x[i] = x[i] + np.float32(local(x[i], goals[i]))
            process.island.depart(base[i] - x[i], 1.0)
        for process in islands * 2:
            process.turn()
        for i, process in enumerate(islands):
            centre = process.island.land()
            np.testing.assert_allclose(centre, expected[number], rtol=2e-5, atol=2e-6)
            x[i] = centre


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"body": b"short"}, "bytes"),
        ({"body": np.full(SIZE, np.nan, np.float32).tobytes()}, "not finite"),
        ({"weight": 4096.0}, "weight"),
        ({"configuration": "0" * 32}, "another run"),
        ({"island": "y"}, "another run, round or island"),
        ({"round": 7}, "another run, round or island"),
        ({"before": "0" * 32}, "another centre"),
    ],
)
def test_a_payload_that_fails_a_check_is_named_by_nobody(two, changes, reason):
    a, b = two
    forged(a, **changes)
    a.depart(1.0)
    a.turn()
    assert [reason in text for text in a.refused] or decisions(a.store)
    b.depart(1.0)
    b.turn()
    a.turn()
    assert [e.island for e in decisions(a.store)[0].entries] in (["a"], ["a", "b"])


def test_refusals_say_why(two):
    a, _ = two
    forged(a, weight=4096.0)
    name = keys.payload_key("y", 1, "0" * 32)
    a.store.create(name, b"garbage")
    a.store.create(keys.payload_key("x", 1, digest(b"gcisland")), b"gcisland")
    a.island.deciding._round = 0
    list_of = a.store.names("island")
    loop, answer = a.island.deciding.poll(list_of, {"a": 0}), None
    with pytest.raises(StopIteration):
        while True:
            answer = a.store.perform(loop.send(answer))
    assert sorted(text.split()[-1] for text in a.refused) == ["1024.0", "payload", "says"]
    assert not decisions(a.store)


def test_a_huge_payload_is_refused_unread(two):
    a, _ = two
    key = keys.payload_key("z", 1, "0" * 32)
    a.store.create(key, bytes(1 << 20))
    reads, get = [], a.store.get
    a.store.get = lambda key: reads.append(key) or get(key)
    a.turn()
    assert key not in reads and a.refused == [f"it has {1 << 20} bytes"]


def test_a_norm_beyond_the_others_median_is_not_named():
    def candidate(norm):
        return Candidate(Entry("n", 1.0, "d", 1), norm)

    def passing(limit=10.0, **norms):
        return [c.norm for c in within_norms({name: candidate(n) for name, n in norms.items()}, limit)]

    assert passing(a=1.0, b=2.0, c=30.0) == [1.0, 2.0]
    assert passing(a=1.0, b=2.0, c=14.0) == [1.0, 2.0, 14.0]
    assert passing(a=1.0, b=11.0) == [1.0]
    assert passing(a=5.0) == [5.0]
    assert passing(a=0.0, b=0.0) == [0.0, 0.0]


def test_what_waited_long_goes_out_in_parts(two):
    """An island that comes back with a hundred times the others' progress is heard, and nothing of it is lost."""
    a, b = two
    for process in (a, b):
        process.depart(1.0)
    a.turn(), b.turn(), a.turn()
    b.depart(100.0)
    sent, rounds = 1.0, 0
    while np.abs(b.island.account.kept).max() > 1.0 or rounds < 3:
        a.depart(1.0)
        if b.island.account.flight is None and b.island._asked is None:
            b.depart(0.0)
        b.turn(), a.turn(), b.turn(), a.turn(), b.turn()
        a.island.land(), b.island.land()
        rounds += 1
        assert rounds < 200
    del sent
    took_part = [d.round for d in decisions(a.store) if "b" in [e.island for e in d.entries]]
    assert len(took_part) > 10
    total = np.zeros(SIZE)
    for decision in decisions(a.store):
        for entry in decision.entries:
            if entry.island == "b":
                data = a.store.get(keys.payload_key("b", decision.round, entry.digest))
                total += HalfCode().decode(Payload.from_bytes(data).body) if data else np.nan
    # Older payloads were deleted; where all are there, they add up to what was handed over.
    if np.isfinite(total).all():
        np.testing.assert_allclose(total + b.island.account.kept, 101.0, rtol=1e-5)


def test_a_decided_payload_that_is_no_code_is_left_out_by_everybody(two):
    """A round is decided by whoever is first. Even one that is malicious cannot bring a NaN into the centre."""
    a, b = two
    data = forged(a, body=np.full(SIZE, np.inf, np.float32).tobytes())
    entry = Entry("z", 1.0, digest(data), len(data))
    now = a.island.log.now
    a.store.create(keys.round_key(1), Decision(1, now.digest, (entry,), ("z",), "z").to_bytes())
    for process in (a, b):
        process.turn()
        assert process.island.log.now.round == 1
    assert a.island.log.now.digest == b.island.log.now.digest == now.digest


def test_one_that_computes_other_bits_is_told(two):
    a, b = two
    a.depart(1.0)
    a.turn(), a.turn()
    right = HalfCode.decode

    class Other(HalfCode):
        def decode(self, data):
            return np.nextafter(right(self, data), np.float32(9))

    b.island.log.code = Other()
    b.turn()
    a.island.land()
    b.island.land()
    a.depart(1.0)
    a.turn(), a.turn()
    with pytest.raises(IslandError, match="other bits than this machine"):
        for _ in range(4):
            b.turn()


def test_a_damaged_centre_is_replaced(two):
    a, b = two
    for _ in range(3):
        a.depart(1.0)
        a.turn(), a.turn()
        b.turn()
    log = b.island.log
    wrong = dataclasses.replace(log.now.state, centre=log.now.state.centre + np.float32(1))
    log.centre = dataclasses.replace(log.now, state=wrong, digest="0" * 32)
    a.depart(1.0)
    a.turn(), a.turn()
    b.turn()
    assert b.island.log.now.digest == a.island.log.now.digest


def test_a_damaged_centre_is_replaced_though_the_store_goes_away(two):
    a, b = two
    for _ in range(3):
        a.depart(1.0)
        a.turn(), a.turn()
        b.turn()
    log = b.island.log
    log.centre = dataclasses.replace(log.now, digest="0" * 32)
    a.depart(1.0)
    a.turn(), a.turn()
    names = a.store.names

    def fails(folder):
        raise StoreError("away")

    a.store.names = fails
    b.turn()
    assert log.centre is None
    a.store.names = names
    b.turn(), b.turn()
    assert log.now.digest == a.island.log.now.digest


def test_an_object_that_is_no_decision_ends_the_exchange(two):
    a, _ = two
    a.store.create(keys.round_key(1), b"{}")
    with pytest.raises(IslandError, match="is no decision of this run"):
        a.turn()


def test_other_configurations_are_named(two):
    other = dataclasses.replace(CONFIGURATION, quorum=2, learning_rate=0.1)
    with pytest.raises(IslandError, match=r"the run has learning_rate 0.7, not 0.1; quorum 1, not 2"):
        Process(two[0].store, "c", other).turn()
    store = MemoryStore()
    store.create(keys.CONFIGURATION, to_json({"centre": "x", "version": 9}))
    with pytest.raises(IslandError, match="another version"):
        Process(store).turn()


def test_a_name_is_one_islands(two):
    with pytest.raises(IslandError, match="an island a is in this run already"):
        Process(two[0].store, "a").turn()
    again = Process(two[0].store, "a", record=two[0].disk)
    again.turn()
    assert again.island.status.round == 0
    elsewhere = Process(MemoryStore(), "a", record=again.disk or two[0].disk)
    elsewhere.turn()
    assert not elsewhere.store.objects, "it does not found a run where its own is not"
    other = MemoryStore()
    Process(other, "b", initial=np.ones(SIZE, np.float32)).turn()
    with pytest.raises(IslandError, match="of a run that began otherwise"):
        Process(other, "a", record=two[0].disk).turn()
    with pytest.raises(IslandError, match="the record is of island a"):
        Process(two[0].store, "b", record=two[0].disk)
    for bad in ("", "a/b", "..", "-x", "x" * 64, 3):
        with pytest.raises(ValueError, match="island's name"):
            keys.check_island(bad)


def test_what_is_not_as_it_was_written_is_not_deleted(two):
    a, _ = two
    mine = {}
    for number in range(1, 12):
        a.depart(1.0)
        a.turn(), a.turn()
        (key,) = [key for key in a.store.objects if key.startswith(f"island/a/payload-{number:010d}")]
        if number in (2, 3):
            # A user has put something else there, under the same name.
            mine[key] = a.store.objects[key] = b"a photograph"
    left = [name.round for key in a.store.objects if (name := keys.read_payload_key(key))]
    assert sorted(left)[:2] == [2, 3] and len(left) < 8
    assert {key: a.store.objects[key] for key in mine} == mine


def test_objects_have_one_form():
    entry = Entry("a", 1.5, "d" * 32, 10)
    decision = Decision(3, "s", (entry, dataclasses.replace(entry, island="b")), ("a", "b", "c"), "b")
    assert Decision.from_bytes(decision.to_bytes()) == decision
    assert (
        decision.accepts("a", "d" * 32) and not decision.accepts("a", "e" * 32) and not decision.accepts("c", "d" * 32)
    )
    payload = Payload("c", 3, "a", 1.5, "s", b"body")
    assert Payload.from_bytes(payload.to_bytes()) == payload
    value = json.loads(decision.to_bytes())
    for bad in (
        b"",
        b"[]",
        b"{",
        b'{"a": 1}',
        decision.to_bytes() + b" ",
        to_json(value | {"entries": value["entries"][::-1]}),
        to_json(value | {"entries": value["entries"][:1] * 2}),
        to_json(value | {"entries": []}),
        to_json(value | {"more": 1}),
        to_json(value | {"entries": [value["entries"][0] | {"weight": 0.1}]}),
        to_json({name: value[name] for name in value if name != "by"}),
    ):
        with pytest.raises(NotOursError):
            Decision.from_bytes(bad)
    whole = payload.to_bytes()
    for bad in (b"", whole[:8], whole[:20], b"x" + whole, whole[:8] + b"\xff\xff\xff\xff" + whole[12:]):
        with pytest.raises(NotOursError):
            Payload.from_bytes(bad)
    assert Configuration.from_dict(json.loads(to_json(CONFIGURATION.to_dict()))) == CONFIGURATION


def test_a_record_is_whole_or_refused():
    code = HalfCode()
    account = Account(np.arange(SIZE, dtype=np.float32))
    flight = account.depart(np.ones(SIZE, np.float32), 2.0, Payload("c", 4, "a", 2.0, "s", b""), code)
    record = Record(
        "a", "token", "c", {"key": "digest"}, 2, "s", account.kept, 4, flight.message, np.ones(SIZE, np.float32)
    )
    data = record.to_bytes()
    again = Record.from_bytes(data)
    assert again.wrote == {"key": "digest"} and (again.island, again.token, again.missed) == ("a", "token", 2)
    np.testing.assert_array_equal(again.progress, 1)
    restored = again.account(code)
    np.testing.assert_array_equal(restored.kept + restored.flight.sent, np.arange(SIZE) + 2.0)
    assert restored.flight.digest == flight.digest
    for damaged in (b"", data[:-1], data[:40] + b"?" + data[41:]):
        with pytest.raises(NotOursError, match="damaged"):
            Record.from_bytes(damaged)


def test_a_record_that_a_run_has_refused_holds_nothing_and_one_that_joined_stays_its_run_s():
    store, other = MemoryStore(), dataclasses.replace(CONFIGURATION, quorum=2)
    Process(store).turn()
    refused = Process(store, "b", other)
    with pytest.raises(IslandError, match="quorum 1, not 2"):
        refused.turn()
    joined = Process(store, "b", record=refused.disk)
    joined.turn()
    assert refused.disk and joined.island.ready
    with pytest.raises(IslandError, match="the record is of island b in another run"):
        Process(store, "b", other, record=joined.disk)
