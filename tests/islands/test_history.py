"""The history of a run is its decisions, from a store that nothing is written to."""

import doctest

import jax.numpy as jnp
import pytest

import gradcomp_jax as gc
from gradcomp_jax.islands import keys
from gradcomp_jax.islands.store import MemoryStore, StoreError, open_store
from tests.islands.test_rounds import Process, decisions


class ReadOnly(MemoryStore):
    """Refuses to be written to."""

    def __init__(self, objects):
        super().__init__()
        self.objects = objects

    def create(self, key, data):
        raise AssertionError(f"{key} is written")

    put = create

    def delete(self, key):
        raise AssertionError(f"{key} is deleted")


def run_of(rounds):
    store = MemoryStore()
    process = Process(store)
    process.turn()
    for _ in range(rounds):
        process.depart(0.5)
        process.turn()
        process.turn()
    return store


def test_it_is_all_decisions_in_their_order():
    # More than are asked for at once, and a multiple of it.
    store = run_of(32)
    found = gc.islands.history(ReadOnly(store.objects))
    assert list(found) == decisions(store) and [d.round for d in found] == list(range(1, 33))
    assert all(d.entries[0].weight == 1.0 and d.members == ("a",) and d.by == "a" for d in found)


def test_a_run_without_a_round_and_none_at_all():
    assert gc.islands.history(run_of(0)) == ()
    with pytest.raises(StoreError, match="there is no run yet"):
        gc.islands.history(MemoryStore())


def test_what_is_no_decision_is_named():
    store = run_of(3)
    store.objects[keys.round_key(3)] = store.objects[keys.round_key(2)]
    with pytest.raises(
        gc.islands.IslandError, match=r"round/0000000003 is no decision of this run \(it is of round 2\)"
    ):
        gc.islands.history(store)


def test_a_folder_that_is_not_there_is_not_made(tmp_path):
    pytest.importorskip("obstore")
    with pytest.raises(StoreError, match="there is no folder"):
        gc.islands.history(tmp_path / "run")
    assert not list(tmp_path.iterdir())
    open_store(tmp_path / "run")
    with pytest.raises(StoreError, match="there is no run yet"):
        gc.islands.history(tmp_path / "run")


@pytest.mark.standard_promotion
def test_the_example_runs(tmp_path):
    names = {"gc": gc, "folder": tmp_path, "params": {"w": jnp.ones((64, 64))}}
    (test,) = doctest.DocTestFinder(recurse=False).find(gc.islands.history, "history", module=False, globs=names)
    failures: list[str] = []
    assert test.examples and not doctest.DocTestRunner().run(test, out=failures.append).failed, "".join(failures)
