"""Weights through deltas are the trainer's, bit for bit, whatever was missed, damaged or answered too late."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax.islands.deltas import apply_delta, encode_delta
from gradcomp_jax.islands.store import MemoryStore

pytest.importorskip("zstandard")


def bits(tree):
    return [np.asarray(leaf).reshape(-1).view(np.uint8) for leaf in jax.tree.leaves(tree)]


def assert_same_bits(a, b):
    assert [leaf.dtype for leaf in jax.tree.leaves(a)] == [leaf.dtype for leaf in jax.tree.leaves(b)]
    for x, y in zip(bits(a), bits(b), strict=True):
        np.testing.assert_array_equal(x, y)


class Trainer:
    """Adam-like steps of 1e-6 on float32 masters, served in bfloat16, with norms in float32."""

    def __init__(self, size=60_000):
        self.rng = np.random.default_rng(0)
        self.master = np.float32(0.02) * self.rng.standard_normal(size, np.float32)
        self.drift = self.rng.choice([-1.0, 1.0], size).astype(np.float32)

    def step(self):
        noise = self.rng.standard_normal(self.master.size, np.float32)
        self.master -= np.float32(1e-6) * np.clip(self.drift + noise, -1, 1)
        return self.params()

    def params(self):
        return {"w": self.master.astype(jnp.bfloat16).reshape(-1, 100), "scale": self.master[:33].copy()}


@pytest.mark.parametrize("steps", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_steps_of_fine_tuning_cost_little_and_lose_no_bit(steps):
    store, trainer = MemoryStore(), Trainer()
    writer = gc.islands.publish_weights(store, trainer.params(), full_every=400)
    reader = gc.islands.read_weights(store, trainer.params())
    deltas, whole = 0, sum(len(b) for b in bits(trainer.params()))
    for number in range(1, steps + 1):
        params = trainer.step()
        published = writer.publish(params)
        assert published.number == number
        deltas += published.delta_bytes
        if number % 7 == 0 or number == steps:
            assert reader.update()[0] == number
            assert_same_bits(reader.update()[1], params)
    print(f"{whole * (steps - 1) / deltas:.1f} times fewer bytes in {steps} steps")
    assert deltas * 20 < whole * (steps - 1)
    late = gc.islands.read_weights(store, trainer.params())
    assert late.update()[0] == steps
    assert_same_bits(late.update()[1], params)


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.05, 0.2, 1.0])
@pytest.mark.parametrize("size", [1, 2, 70_001])
def test_any_share_of_changes_comes_back(share, size):
    rng = np.random.default_rng(size)
    old = rng.integers(0, 1 << 16, size, dtype=np.uint16)
    changed = rng.random(size) < share
    new = np.where(changed, rng.integers(0, 1 << 16, size, dtype=np.uint16), old)
    head, body = encode_delta(old, new)
    np.testing.assert_array_equal(apply_delta(old, head, body), new)
    assert head["count"] == np.count_nonzero(old != new)
    assert head["mode"] == ("gaps" if head["count"] * 16 < size else "all")


def test_the_first_and_the_last_word_and_every_dtype():
    params = {
        "a": np.arange(5, dtype=np.int8),
        "b": jnp.ones((3,), jnp.bfloat16),
        "c": np.float32(2.5),
        "d": np.zeros((0, 3)),
    }
    store = MemoryStore()
    writer, reader = gc.islands.publish_weights(store, params), gc.islands.read_weights(store, params)
    writer.publish(params)
    assert_same_bits(reader.update()[1], params)
    other = {**params, "a": np.array([9, 1, 2, 3, -7], np.int8), "c": np.float32(-2.5)}
    assert writer.publish(other).changed == 3
    assert_same_bits(reader.update()[1], other)
    with pytest.raises(ValueError, match="other shapes or dtypes"):
        writer.publish({**params, "c": np.float64(1)})


def published(count, full_every=4, size=2000):
    store, trainer = MemoryStore(), Trainer(size)
    writer = gc.islands.publish_weights(store, trainer.params(), full_every=full_every)
    versions = []
    for _ in range(count):
        versions.append(trainer.step())
        writer.publish(versions[-1])
    return store, trainer, writer, versions


def test_a_missed_or_damaged_delta_costs_a_full_copy():
    store, trainer, writer, versions = published(2)
    reader = gc.islands.read_weights(store, versions[0])
    assert reader.update()[0] == 2
    versions.append(trainer.step())
    writer.publish(versions[-1])
    whole = store.objects["weights/0000000003-delta"]
    for damaged in (b"", whole[:30], whole[:-1], whole[:-3] + b"???", whole + b"?"):
        store.objects["weights/0000000003-delta"] = damaged
        number, params = reader.update()
        assert number == 2
        assert_same_bits(params, versions[1])
    while len(versions) < 6:
        versions.append(trainer.step())
        writer.publish(versions[-1])
    number, params = reader.update()
    assert number == 6
    assert_same_bits(params, versions[5])


def test_two_full_copies_stay_and_nothing_of_others_is_deleted():
    store, trainer, writer, versions = published(6)
    mine = "weights/0000000002-delta"
    assert mine in store.objects
    store.objects[mine] = store.objects["weights/notes.txt"] = b"mine"
    for _ in range(20):
        versions.append(trainer.step())
        writer.publish(versions[-1])
    full = sorted(key for key in store.objects if key.endswith("full"))
    assert len(full) == 2
    assert store.objects[mine] == store.objects["weights/notes.txt"] == b"mine"
    deltas = [key for key in store.objects if key.endswith("delta") and key != mine]
    assert 4 <= len(deltas) <= 8 and min(deltas) > full[0].replace("full", "delta")
    number, params = gc.islands.read_weights(store, versions[0]).update()
    assert number == 26
    assert_same_bits(params, versions[-1])


def test_a_writer_that_begins_again_goes_on_with_a_full_copy():
    store, trainer, _, versions = published(3)
    reader = gc.islands.read_weights(store, versions[0])
    reader.update()
    again = gc.islands.publish_weights(store, versions[0])
    versions.append(trainer.step())
    found = again.publish(versions[-1])
    assert (found.number, found.delta_bytes) == (4, 0) and found.full_bytes > 0
    number, params = reader.update()
    assert number == 4
    assert_same_bits(params, versions[-1])


class Unsure(MemoryStore):
    """Some writes fail, before or after they are done."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def create(self, key, data):
        luck = self.rng.random()
        if luck < 0.3:
            raise gc.islands.StoreError("refused")
        done = super().create(key, data)
        if luck < 0.6:
            raise gc.islands.StoreError("the answer was lost")
        return done


def test_lost_answers_lose_no_version():
    store, trainer = Unsure(), Trainer(2000)
    writer = gc.islands.publish_weights(store, trainer.params(), full_every=5)
    reader, last = gc.islands.read_weights(store, trainer.params()), None
    failed = 0
    for _ in range(200):
        params = trainer.step()
        try:
            writer.publish(params)
        except gc.islands.StoreError:
            failed += 1
            continue
        last = params
        assert_same_bits(reader.update()[1], last)
    assert 50 < failed < 190 and last is not None


def test_two_writers_and_other_weights_are_refused():
    store, trainer, writer, versions = published(2)
    store.create("weights/0000000003-delta", b"somebody's")
    with pytest.raises(gc.islands.IslandError, match="weights/0000000003-delta is another process's"):
        writer.publish(trainer.step())
    with pytest.raises(ValueError, match="other names, shapes or dtypes"):
        gc.islands.read_weights(store, {"w": versions[0]["w"]}).update()
    with pytest.raises(gc.islands.StoreError, match="no weights were published"):
        gc.islands.read_weights(MemoryStore(), versions[0]).update()


def test_without_the_extra_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match=r"pip install 'gradcomp_jax\[islands\]'"):
        gc.islands.publish_weights(MemoryStore(), {"w": np.ones(3)})
