"""One of many writers wins, on every store; the store away is one kind of error."""

import sys
import threading

import pytest

from gradcomp_jax._errors import SettingError
from gradcomp_jax.islands.store import GetAll, MemoryStore, StoreError, open_store


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path):
    if request.param == "memory":
        return MemoryStore()
    pytest.importorskip("obstore")
    return open_store(tmp_path / "run")


def test_five_verbs(store):
    assert store.get("a/b") is None and store.names("a") == {}
    assert store.create("a/b", b"first")
    assert not store.create("a/b", b"other")
    assert store.get("a/b") == b"first"
    store.put("a/b", b"newer")
    store.put("ab", b"x")
    assert store.get("a/b") == b"newer"
    assert store.names("a") == {"a/b": 5} and store.names("") == {"a/b": 5, "ab": 1}
    store.delete("a/b")
    store.delete("a/b")
    assert store.names("") == {"ab": 1}


def test_several_objects_come_in_order(store):
    for number in range(0, 40, 2):
        store.create(f"a/{number}", bytes([number]))
    wanted = tuple(f"a/{number}" for number in range(40))
    assert store.perform(GetAll(wanted)) == [bytes([n]) if n % 2 == 0 else None for n in range(40)]
    assert store.perform(GetAll(())) == []


def test_one_writer_wins(store):
    for number in range(20):
        won, start = [], threading.Barrier(8)

        def race(writer, key=f"round/{number}", won=won, start=start):
            start.wait()
            if store.create(key, bytes([writer]) * 10_000):
                won.append(writer)

        threads = [threading.Thread(target=race, args=(writer,)) for writer in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert store.get(f"round/{number}") == bytes(won) * 10_000


def test_a_folder_that_is_away_is_a_store_error(tmp_path):
    pytest.importorskip("obstore")
    store = open_store(str(tmp_path / "run"))
    (tmp_path / "run").rmdir()
    (tmp_path / "run").write_bytes(b"no folder")
    with pytest.raises(StoreError, match="did not put round/1"):
        store.create("round/1", b"x")
    with pytest.raises(SettingError, match="cannot open"):
        open_store(tmp_path / "run" / "below")


def test_without_the_extra_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ImportError, match=r"pip install 'gradcomp_jax\[islands\]'"):
        open_store(tmp_path)


def test_a_memory_store_takes_no_other_requests():
    with pytest.raises(TypeError, match="answers no int"):
        MemoryStore().perform(3)
