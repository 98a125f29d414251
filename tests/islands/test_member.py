"""Islands as a user has them: around any training, in threads of their own, over a store that may be away."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax._errors import SettingError
from gradcomp_jax.islands import exchanging
from gradcomp_jax.islands.account import Record
from gradcomp_jax.islands.objects import Decision, Payload

PARAMS = {"w": jnp.ones((16, 16)), "b": jnp.zeros(5)}
CODE = gc.islands.codec(gc.compressors.block_quantized(bits=8, block=64), PARAMS)
OPTIONS = {
    "compressor": CODE,
    "every": 3,
    "grace": 0.05,
    "poll": 0.005,
    "patience": 5.0,
    "learning_rate": 1.0,
    "momentum": 0.0,
}
GOAL = jax.tree.map(lambda a: np.full(a.shape, 3.0, np.float32), PARAMS)


def towards(params, rate=0.1):
    return jax.tree.map(lambda p, g: jnp.asarray(p + np.float32(rate) * (g - np.asarray(p))), params, GOAL)


def decisions(store):
    return [Decision.from_bytes(store.get(key)) for key in sorted(store.names("round"))]


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.005)


def train(island, params, rounds, *, pause=0.002):
    """Trains until so many more payloads were accepted."""
    last = island.diagnostics()["island/accepted"] + rounds
    end = time.monotonic() + 30.0
    while island.diagnostics()["island/accepted"] < last:
        params = island.step(towards(params))
        assert time.monotonic() < end, island.diagnostics()
        time.sleep(pause)
    return params


def test_three_islands_come_to_one_centre(tmp_path):
    store, found, failed = gc.islands.MemoryStore(), {}, []
    # Where each of three decides a round of its own, the centre moves three times: a rate of one would overshoot.
    options = OPTIONS | {"learning_rate": 0.3}

    def run(name):
        try:
            with gc.islands.join(store, PARAMS, name=name, folder=tmp_path / name, **options) as island:
                params = train(island, island.begin(PARAMS), 6)
                found[name] = params, island.diagnostics()
                assert island.close(params, timeout=10.0) in (True, False)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=run, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(found) == 3
    log = decisions(store)
    assert [d.round for d in log] == list(range(1, len(log) + 1))
    assert {e.island for d in log for e in d.entries} == {"a", "b", "c"}
    number, centre = gc.islands.follow(store, PARAMS, compressor=CODE).update()
    assert number == len(log)
    assert 1.1 < float(centre["w"].mean()) < 4.9
    assert not [key for key in store.objects if key.endswith("/alive")]
    for _, numbers in found.values():
        assert numbers["island/accepted"] >= 6 and numbers["island/away"] == 0
        assert numbers["island/bytes_written"] >= 6 * CODE.payload_bytes
        assert numbers["island/hidden_seconds"] > 0


def test_nothing_is_lost_by_leaving_and_coming_back(tmp_path):
    """With no outer momentum and a rate of one, one island's parameters are its centre less what it has kept."""
    store, params, kept = gc.islands.MemoryStore(), PARAMS, np.float32(0)
    for _ in range(3):
        with gc.islands.join(store, PARAMS, name="a", folder=tmp_path, **OPTIONS) as island:
            begun = island.begin(PARAMS)
            np.testing.assert_allclose(CODE.flat(begun) - kept, CODE.flat(params), atol=1e-5)
            params = train(island, begun, 3)
            # One more step, which no payload has.
            params = island.step(towards(params))
            # The parameters do not have what is kept; from here on it counts as theirs.
            island.close(params, timeout=10.0)
        record = Record.from_bytes((tmp_path / "island.record").read_bytes())
        assert record.message == b""
        kept = record.kept


def test_what_was_put_aside_stays_until_it_has_departed(tmp_path):
    """An island that could not send its last steps, came back twice without a step, and was killed once."""
    store = Away()
    with gc.islands.join(store, PARAMS, name="a", folder=tmp_path, **OPTIONS) as island:
        params = train(island, island.begin(PARAMS), 2)
        until(lambda: island._exchanging.island.account.flight is None)
        store.away = True
        params = island.step(towards(params))
        if not island._steps:
            # It was the third since the last departure, and departed.
            params = island.step(towards(params))
        island.close(params, timeout=0.1)
    store.away = False
    kept = Record.from_bytes((tmp_path / "island.record").read_bytes())
    held = kept.kept + (CODE.decode(Payload.from_bytes(kept.message).body) if kept.message else np.float32(0))
    assert np.abs(kept.progress).max() > 0
    for _ in range(2):
        with gc.islands.join(store, PARAMS, name="a", folder=tmp_path, **OPTIONS) as island:
            begun = island.begin(PARAMS)
        np.testing.assert_allclose(CODE.flat(begun) - held, CODE.flat(params), atol=1e-5)


class Away(gc.islands.MemoryStore):
    """A store that may be away, or whose answers are lost."""

    away = False

    def perform(self, request):
        if self.away:
            raise gc.islands.StoreError("no route to host")
        return super().perform(request)


def test_the_store_away_is_trained_through(tmp_path):
    store = Away()
    with gc.islands.join(store, PARAMS, name="a", folder=tmp_path, **OPTIONS) as island:
        params = train(island, island.begin(PARAMS), 2)
        store.away = True
        until(lambda: island.diagnostics()["island/away"] > 1)
        before = island.diagnostics()["island/accepted"]
        for _ in range(20):
            params = island.step(towards(params))
        assert island.diagnostics()["island/accepted"] == before
        store.away = False
        train(island, params, 2)
        assert island.diagnostics()["island/away"] == 0


def test_an_empty_store_in_the_place_of_the_runs_counts_for_nothing(tmp_path):
    """A disk that is not mounted leaves an empty folder, which can be written to."""
    store = gc.islands.MemoryStore()
    with gc.islands.join(store, PARAMS, name="a", folder=tmp_path, **OPTIONS) as island:
        params = train(island, island.begin(PARAMS), 2)
        objects, store.objects = store.objects, {}
        until(lambda: island.diagnostics()["island/away"] > 1)
        number = island.diagnostics()["island/round"]
        for _ in range(10):
            params = island.step(towards(params))
            time.sleep(0.005)
        # One that was under way may have come to the wrong place: it counts for nothing.
        assert island.diagnostics()["island/round"] == number and len(store.names("round")) <= 1
        store.objects = objects
        train(island, params, 2)
        centre = island._exchanging.island.log.now
    follower = gc.islands.follow(store, PARAMS, compressor=CODE)
    assert follower.update()[0] == centre.round == len(store.names("round"))
    assert follower._log.now.digest == centre.digest


def test_parameters_that_are_not_finite_are_given_up(tmp_path):
    with gc.islands.join(gc.islands.MemoryStore(), PARAMS, name="a", folder=tmp_path, **OPTIONS) as island:
        params = train(island, island.begin(PARAMS), 1)
        until(lambda: island._exchanging.island.account.flight is None and island._exchanging.island._asked is None)
        bad = jax.tree.map(lambda p: p * jnp.nan, params)
        with pytest.warns(UserWarning, match="not finite: this island goes on from where it departed"):
            for _ in range(4):
                bad = island.step(bad)
                if np.isfinite(CODE.flat(bad)).all():
                    break
        assert np.isfinite(CODE.flat(bad)).all()
        assert island.diagnostics()["island/dropped"] == 1
        train(island, bad, 1)


def test_a_draft_of_a_killed_process_goes_and_files_of_others_stay(tmp_path):
    draft, other = tmp_path / f"island.record.{'0' * 16}.new", tmp_path / "island.record.mine"
    draft.write_bytes(b"half")
    other.write_bytes(b"mine")
    with gc.islands.join(gc.islands.MemoryStore(), PARAMS, name="a", folder=tmp_path, **OPTIONS) as island:
        island.begin(PARAMS)
    assert not draft.exists() and other.read_bytes() == b"mine"


def test_a_disk_that_is_full_sends_nothing(tmp_path, monkeypatch):
    """What is not on its own disk is in no payload."""
    store = gc.islands.MemoryStore()
    with gc.islands.join(store, PARAMS, name="a", folder=tmp_path, **OPTIONS) as island:
        params = train(island, island.begin(PARAMS), 2)

        def full(*args, **options):
            raise OSError(28, "No space left on device")

        until(lambda: island._exchanging.island.account.flight is None and island._exchanging.island._asked is None)
        monkeypatch.setattr(exchanging, "write_whole", full)
        written = len([key for key in store.names("island") if "payload" in key])
        for _ in range(5):
            params = island.step(towards(params))
        until(lambda: island.diagnostics()["island/away"] > 1)
        assert len([key for key in store.names("island") if "payload" in key]) <= written
        monkeypatch.undo()
        train(island, params, 1)


def test_dtypes_and_shardings_stay(tmp_path, mesh8):
    sharding = jax.sharding.NamedSharding(mesh8, jax.P("data"))
    params = {"w": jax.device_put(jnp.ones((16, 16), jnp.bfloat16), sharding), "b": jnp.zeros(5)}
    with gc.islands.join(gc.islands.MemoryStore(), params, name="a", folder=tmp_path, **OPTIONS) as island:
        params = island.begin(params)
        for _ in range(200):
            params = island.step(jax.tree.map(lambda p: p - jnp.ones((), p.dtype) / 16, params))
            assert params["w"].sharding == sharding and params["w"].dtype == jnp.bfloat16
            if island.diagnostics()["island/round"] > 1:
                break
            time.sleep(0.005)


def test_mistakes_are_said(tmp_path):
    store = gc.islands.MemoryStore()
    join = {"name": "a", "folder": tmp_path / "a", **OPTIONS}
    with pytest.raises(RuntimeError, match="within `with"):
        gc.islands.join(store, PARAMS, **join).begin(PARAMS)
    with gc.islands.join(store, PARAMS, **join) as island:
        with pytest.raises(RuntimeError, match=r"call begin\(params\)"):
            island.step(PARAMS)
        island.begin(PARAMS)
        with pytest.raises(RuntimeError, match="joined once"):
            island.__enter__()
        with pytest.raises(SettingError, match="another process is the island of"):
            gc.islands.join(store, PARAMS, **join).__enter__()
    other = join | {"name": "b", "folder": tmp_path / "b", "momentum": 0.5}
    wrong = pytest.raises(gc.islands.IslandError, match=r"the run has momentum 0\.0, not 0\.5")
    with gc.islands.join(store, PARAMS, **other) as island, wrong:
        island.begin(PARAMS)
    full = gc.islands.MemoryStore()
    full.put("photo", b"mine")
    wrong = pytest.raises(gc.islands.IslandError, match="the place holds photo and no run")
    with gc.islands.join(full, PARAMS, **join | {"folder": tmp_path / "c"}) as island, wrong:
        island.begin(PARAMS)
    assert set(full.objects) == {"photo"}
    late, wrong = (
        join | {"folder": tmp_path / "d", "found": False},
        pytest.raises(TimeoutError, match="no centre within"),
    )
    with gc.islands.join(gc.islands.MemoryStore(), PARAMS, **late) as island, wrong:
        island.begin(PARAMS, timeout=0.1)
    for changes, reason in [
        ({"every": 0}, "every"),
        ({"quorum": 0}, "quorum"),
        ({"momentum": 1.0}, "momentum"),
        ({"weight": 5000.0}, "weight must be within"),
        ({"weight": 0.0}, "weight"),
        ({"norm_limit": 1.0}, "norm_limit"),
        ({"poll": 0.0}, "poll"),
        ({"compressor": gc.compressors.rotated(4, block=64)}, "sums of products"),
        ({"name": "a/b"}, "island's name"),
    ]:
        with pytest.raises(ValueError, match=reason):
            gc.islands.join(store, PARAMS, **join | changes)


def test_a_follower_writes_nothing_and_waits_for_a_run(tmp_path):
    store = gc.islands.MemoryStore()
    follower = gc.islands.follow(store, PARAMS, compressor=CODE)
    with pytest.raises(gc.islands.StoreError, match="no run yet"):
        follower.update()
    with gc.islands.join(store, PARAMS, name="a", folder=tmp_path, **OPTIONS) as island:
        train(island, island.begin(PARAMS), 2)
    before = dict(store.objects)
    number, centre = follower.update()
    assert number >= 2 and centre["w"].shape == (16, 16)
    assert store.objects == before
    other = gc.islands.codec(gc.compressors.block_quantized(bits=4), PARAMS)
    with pytest.raises(gc.islands.IslandError, match="the run has code"):
        gc.islands.follow(store, PARAMS, compressor=other).update()


def test_a_follower_makes_no_folder(tmp_path):
    pytest.importorskip("obstore")
    place = tmp_path / "run"
    follower = gc.islands.follow(place, PARAMS, compressor=CODE)
    with pytest.raises(gc.islands.StoreError, match="no folder"):
        follower.update()
    assert not place.exists()
    place.mkdir()
    with pytest.raises(gc.islands.StoreError, match="no run yet"):
        follower.update()
