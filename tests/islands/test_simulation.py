"""The invariants of rounds, in seeded runs of islands over a store, networks, clocks and disks with faults."""

import pytest

from gradcomp_jax.islands import keys
from gradcomp_jax.islands.objects import Configuration
from tests.islands.simulation import Actor, Faults, Follower, HalfCode, World

CONFIGURATION = Configuration(
    size=HalfCode.size,
    code=HalfCode.digest,
    learning_rate=0.7,
    momentum=0.5,
    grace=3.0,
    patience=12.0,
    snapshot_every=2,
    norm_limit=10.0,
    weights=(0.25, 4.0),
)
FOREIGN = {"island/a/notes.txt": b"mine", "centre/readme": b"mine", "round/notes": b"mine"}


def simulate(seed):
    """One run: faults that the seed draws, then calm; every invariant is checked on the way and at the end."""
    world = World(seed, CONFIGURATION, Faults())
    rng = world.rng
    for key, data in FOREIGN.items():
        world.store.write(key, data, -1.0, "user")
    world.faults = Faults(
        refused=rng.choice([0, 0.02, 0.1]),
        answer_lost=rng.choice([0, 0.02, 0.1]),
        done_later=rng.choice([0, 0.03, 0.1]),
        stale=rng.choice([0, 0.1, 0.3]),
        slow=rng.choice([0, 0.02, 0.1]),
        crash=rng.choice([0, 0.01, 0.03]),
    )
    for number, name in enumerate("abc"):
        world.actors.append(
            Actor(
                world,
                name,
                born=rng.exponential(10.0) if number else 0.0,
                weight=rng.choice([0.5, 1.0, 2.0]),
                pace=rng.choice([0.5, 1.0, 3.0]),
                rate=rng.choice([0.3, 1.0, 4.0]),
                leaves=rng.choice([None, None, 20.0]) if number == 2 else None,
                founds=number < 2,
            )
        )
        if rng.random() < 0.4:
            begin = rng.exponential(15.0)
            world.cut[name] = [(begin, begin + rng.exponential(15.0))]
        elif rng.random() < 0.3:
            begin = rng.exponential(20.0)
            world.unmounted[name] = (begin, begin + rng.exponential(8.0))
    world.actors.append(Follower(world, "reader", born=rng.exponential(20.0)))
    world.run(40.0)
    decided = len(world.store.decisions())
    world.faults, world.cut, world.unmounted = Faults(), {}, {}
    # From here on every island comes back, and all go on.
    for actor in world.actors:
        actor.wake = min(actor.wake, world.time + 1.0) if not actor.gone else actor.wake
    goal = "no round was decided after the faults"
    while goal and world.time < 200.0:
        world.run(world.time + 6.0)
        goal = unreached(world, decided)
    assert not goal, goal
    for actor in world.actors:
        actor.check_law()
    world.replay()
    for key, data in FOREIGN.items():
        assert world.store.past[key] == [(-1.0, data, "user")]
    return world


def unreached(world, decided):
    """Says who has not come as far as all should once there are no faults."""
    after = world.store.decisions()[decided:]
    for actor in world.actors:
        log = actor.log if isinstance(actor, Follower) else actor.island and actor.island.log
        if actor.gone:
            continue
        if not log or not log.centre or decided + len(after) - log.centre.round > 2:
            return f"{actor.name} is behind"
        if not isinstance(actor, Follower) and all(actor.name not in [e.island for e in d.entries] for d in after):
            return f"{actor.name} was in none of the rounds from {decided + 1} on"
    return "" if len(after) > 1 else "no rounds were decided after the faults"


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_two_hundred_runs(first: int) -> None:
    for seed in range(first, first + 50):
        simulate(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 11_000, 500))
def test_ten_thousand_runs(first: int) -> None:
    for seed in range(first, first + 500):
        simulate(seed)


def test_runs_meet_what_they_are_for() -> None:
    """Rounds that refuse somebody, crashes, jumps to snapshots and deletions are there to be checked."""
    worlds = [simulate(seed) for seed in range(40)]
    decisions = [d for world in worlds for d in world.store.decisions()]
    assert len(decisions) > 200
    assert any(len(d.entries) < len(d.members) for d in decisions)
    assert {len(d.entries) for d in decisions} >= {1, 2, 3}
    assert sum(actor.crashes for world in worlds for actor in world.actors) > 20
    deleted = [key for world in worlds for _, key, _ in world.store.deleted]
    assert any(keys.read_centre_key(key) for key in deleted)
    assert any(keys.read_payload_key(key) for key in deleted)
