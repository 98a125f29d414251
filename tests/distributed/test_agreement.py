"""What differs between processes is named: in words, with the processes, in each of them."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp_jax import _compat
from gradcomp_jax._errors import SettingError
from gradcomp_jax.distributed import ClusterError, agreement, check_equal
from gradcomp_jax.distributed.surroundings import surroundings


class Store:
    """The part of JAX's coordination service that is used, for threads of one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self._changed:
            assert key not in self.values
            self.values[key] = value
            self._changed.notify_all()

    def key_value_delete(self, key: str) -> None:
        self.values.pop(key, None)

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: nothing came")
            return self.values[key]


@pytest.fixture
def together(monkeypatch):
    """Calls ``check_equal`` as processes would, several times; what each of them raised last."""
    own = threading.local()
    store = Store()
    monkeypatch.setattr(_compat, "key_value_store", lambda: (store, own.index, own.count))

    class Calls:
        def __next__(self) -> int:
            own.calls = getattr(own, "calls", 0) + 1
            return own.calls

    monkeypatch.setattr(agreement, "_calls", Calls())

    def call(*values, timeout: float = 20, times: int = 1) -> list:
        found: list = [None] * len(values)

        def one(index: int) -> None:
            own.index, own.count = index, len(values)
            if values[index] is None:
                return
            try:
                for _ in range(times):
                    check_equal(values[index], timeout=timeout)
            except Exception as error:
                found[index] = error

        threads = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(len(values))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        return found

    call.store = store
    return call


def test_equal_values_pass_and_leave_nothing_behind(together) -> None:
    assert together(*[{"a": 1, "b": [1, "x"], "c": None}] * 3, times=5) == [None] * 3
    # The verdict of the last call.
    assert len(together.store.values) == 1


def test_every_process_hears_what_differs_and_where(together) -> None:
    found = together({"--seed": 1, "rate": 0.1}, {"--seed": 1, "rate": 0.2}, {"--seed": 1, "rate": 0.1})
    assert all(isinstance(error, SettingError) for error in found)
    assert {str(error) for error in found} == {
        "the processes differ: rate is 0.1 in processes 0 and 2 and 0.2 in process 1: start all of them with the same"
    }


def test_sets_have_no_order(together) -> None:
    assert together({"names": {"a", "b", "c"}}, {"names": {"c", "b", "a"}}) == [None] * 2


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_all_entries_of_an_array_count(together, kind) -> None:
    """The text of a long array leaves its middle out."""
    one, other = np.arange(5000.0), np.arange(5000.0)
    other[2500] = -1
    found = together({"same": kind(one), "w": kind(one)}, {"same": kind(one), "w": kind(other)})
    assert all("the processes differ: w is" in str(error) for error in found)


def test_a_process_that_does_not_come_is_named(together) -> None:
    found = together({"a": 1}, {"a": 1}, None, timeout=0.5)
    assert all(isinstance(error, ClusterError) for error in found[:2])
    assert "process 2 did not come to the comparison of the processes within 0.5 s" in str(found[1])


def test_alone_there_is_nothing_to_compare() -> None:
    check_equal({"a": object()})


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ([{"a": "1"}] * 4, ""),
        ([{"a": '"x y"'}, {"a": "null"}, {}], "a is x y in process 0 and not set in processes 1 and 2"),
        ([{"a": "1"}, {}], "a is 1 in process 0 and not set in process 1"),
        ([{"a": "1"}] * 4 + [{"a": "2"}] * 3, "a is 1 in processes 0 to 3 and 2 in processes 4 to 6"),
        (
            [{"a": str(i)} for i in range(6)],
            "a is 0 in process 0, 1 in process 1, 2 in process 2 and 3 other values elsewhere",
        ),
        (
            [{str(i): "x" for i in range(5)}, {str(i): "y" for i in range(5)}],
            "; ".join(f"{i} is x in process 0 and y in process 1" for i in range(3)) + "; and 2 more",
        ),
    ],
)
def test_words(told, words: str) -> None:
    assert agreement.difference(told) == words


def test_long_values_are_shown_where_they_part() -> None:
    same = "-" * 500
    words = agreement.difference([{"flags": same + "A" + same}, {"flags": same + "B" + same}])
    assert "A" in words and "B" in words and len(words) < 250


def test_surroundings_are_those_that_decide_a_result() -> None:
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_cpu_enable_fast_math=true"}
    more = {
        "XLA_FLAGS": "--xla_cpu_enable_fast_math=true --xla_dump_to=/tmp/x --xla_force_host_platform_device_count=4"
    }
    fast = surroundings(devices)
    assert fast == surroundings(more)
    assert fast["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=true"
    assert fast != surroundings({})
    with jax.enable_x64(True):
        assert agreement.difference([fast, surroundings(devices)]) == (
            "jax_enable_x64 is False in process 0 and True in process 1"
        )
    assert {"the version of jax", "the version of gradcomp-jax", "the source of gradcomp_jax"} <= set(fast)
