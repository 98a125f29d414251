"""How the processes of one island agree: here they are threads, with a coordination service of their own."""

import itertools
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax._errors import SettingError
from gradcomp_jax.islands import joining, processes
from gradcomp_jax.islands.account import Record
from gradcomp_jax.islands.objects import Payload
from gradcomp_jax.islands.processes import MEETINGS, Processes, Several
from tests.islands.test_member import CODE, OPTIONS, PARAMS, Away, towards, until


class Service:
    """JAX's coordination service, and the broadcast of an array, for threads of one process."""

    def __init__(self):
        self.values, self.changed, self.sets = {}, threading.Condition(), 0

    def key_value_set(self, key, value):
        with self.changed:
            assert key not in self.values
            self.values[key], self.sets = value, self.sets + 1
            self.changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_increment(self, key, by):
        with self.changed:
            self.values[key] = self.values.get(key, 0) + by
            return self.values[key]

    def key_value_delete(self, key):
        with self.changed:
            self.values = {k: v for k, v in self.values.items() if k != key and not k.startswith(f"{key}/")}


def together(monkeypatch, run, count=2):
    """Runs a program in so many processes of one island; returns what each of them gave or raised, and their service."""
    service, own, found = Service(), threading.local(), [None] * count
    arrays = [Service() for _ in range(count)]

    def of_program():
        numbers = itertools.count()

        def spread(array):
            number = str(next(numbers))
            if own.index == 0:
                for each in arrays[1:]:
                    each.key_value_set(number, np.array(array))
                return np.array(array)
            value = arrays[own.index].blocking_key_value_get(number, 20_000)
            arrays[own.index].key_value_delete(number)
            return value

        return Several(service, own.index, count, f"island/{next(own.joins)}", spread=spread)

    def start(index):
        own.index, own.joins = index, itertools.count()
        try:
            found[index] = run(index)
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=start, args=(index,), daemon=True) for index in range(count)]
    with monkeypatch.context() as patch:
        patch.setattr(joining, "of_program", of_program)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive(), "a process hangs"
    return found, service


@pytest.fixture
def join(tmp_path):
    """Joins in one of the processes; only the first has a store and a folder."""
    store = Away()

    def joined(index, **changes):
        options = {"name": "a", "folder": tmp_path / f"process-{index}"} | OPTIONS | changes
        return gc.islands.join(tmp_path / "nowhere" if index else store, PARAMS, **options)

    joined.store, joined.folder = store, tmp_path
    return joined


def bits(params):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]


@pytest.mark.parametrize("every", [3, 80])
def test_all_processes_take_the_same_steps_to_the_same_parameters(monkeypatch, join, every):
    def run(index):
        seen = []
        with join(index, every=every) as island:
            params = island.begin(PARAMS)
            while island.diagnostics()["island/accepted"] < 4:
                params = island.step(towards(params))
                seen.append((bits(params), island.diagnostics()))
                if index == 0:
                    # The first one's thread does its rounds meanwhile.
                    threading.Event().wait(0.002)
            accepted = island.close(params, timeout=10.0)
            assert not island.close(params)
        return seen, accepted, bits(params)

    (first, second, third), service = together(monkeypatch, run, count=3)
    assert not isinstance(first, BaseException), first
    assert first == second == third
    seen, accepted, _ = first
    assert accepted and seen[-1][1]["island/accepted"] >= 4
    # What was read is deleted, and only the first process has a folder.
    assert not service.values
    assert [path.name for path in join.folder.iterdir()] == ["process-0"]
    # A step on which nobody meets sends nothing. A departure or a landing sends two messages more.
    if every == 80:
        assert len(seen) > 300 and service.sets <= len(seen) / (every // MEETINGS) + 40


def test_nothing_is_lost_by_leaving_and_coming_back(monkeypatch, join):
    """With no outer momentum and a rate of one, one island's parameters are its centre less what it has kept."""
    params, kept = PARAMS, np.float32(0)
    for _ in range(2):

        def run(index, params=params, kept=kept):
            with join(index) as island:
                begun = island.begin(PARAMS)
                np.testing.assert_allclose(CODE.flat(begun) - kept, CODE.flat(params), atol=1e-5)
                params = begun
                while island.diagnostics()["island/accepted"] < 3:
                    params = island.step(towards(params))
                    threading.Event().wait(0.002)
                island.close(params, timeout=10.0)
            return params

        (params, other), _ = together(monkeypatch, run)
        assert not isinstance(params, BaseException), params
        assert bits(params) == bits(other)
        record = Record.from_bytes((join.folder / "process-0" / "island.record").read_bytes())
        assert record.message == b""
        kept = record.kept


def test_a_store_that_is_away_holds_up_no_end(monkeypatch, join):
    def run(index):
        with join(index, poll=0.05) as island:
            params = towards(island.begin(PARAMS))
            if index == 0:
                join.store.away = True
            started = time.monotonic()
            accepted = island.close(params, timeout=0.3)
            return accepted, time.monotonic() - started

    found, _ = together(monkeypatch, run)
    assert [accepted for accepted, _ in found] == [False, False]
    assert found[0][1] < 10.0 and found[1][1] < 10.0
    # What was gained is in the folder.
    record = Record.from_bytes((join.folder / "process-0" / "island.record").read_bytes())
    held = (
        record.progress if record.progress.size else CODE.decode(Payload.from_bytes(record.message).body) + record.kept
    )
    np.testing.assert_allclose(held, CODE.flat(PARAMS) - CODE.flat(towards(PARAMS)), atol=1e-6)


def test_when_processes_meet():
    one, several = Processes(), Several(Service(), 0, 2, "")
    for every in (1, 3, 8, 20, 100, 1001):
        met = [steps for steps in range(1, 2 * every + 1) if several.meet(steps, every)]
        assert every in met and met[0] == max(1, every // MEETINGS)
        assert len(met) <= min(2 * every, 3 * MEETINGS)
        assert all(one.meet(steps, every) for steps in range(1, every))


def raised(found):
    assert all(isinstance(error, Exception) for error in found), found
    return [(type(error), str(error)) for error in found]


def test_what_the_first_raises_is_raised_in_all(monkeypatch, join):
    def begin(index, timeout=5.0, **changes):
        with join(index, **changes) as island:
            return island.begin(PARAMS, timeout=timeout)

    # Nobody founds the run; then somebody has, with other settings.
    found, _ = together(monkeypatch, lambda index: begin(index, timeout=0.05, found=False))
    one, other = raised(found)
    assert one == other and one[0] is TimeoutError and "no centre within 0.05 s" in one[1]
    found, _ = together(monkeypatch, begin)
    assert bits(found[0]) == bits(found[1]) == bits(PARAMS)
    found, _ = together(monkeypatch, lambda index: begin(index, momentum=0.5, folder=join.folder / "b", name="b"))
    one, other = raised(found)
    assert one == other and one[0] is gc.islands.IslandError and "the run has momentum 0.0, not 0.5" in one[1]
    with gc.islands.join(join.store, PARAMS, name="a", folder=join.folder / "process-0", **OPTIONS):
        found, _ = together(monkeypatch, begin)
        one, other = raised(found)
        assert one == other and one[0] is SettingError and "another process is the island of" in one[1]
    found, _ = together(monkeypatch, lambda index: begin(index, every=3 + index))
    one, other = raised(found)
    assert one == other and one[0] is SettingError and "every is 3 in process 0 and 4 in process 1" in one[1]


def test_a_thread_that_ends_by_an_error_ends_all_at_the_same_step(monkeypatch, join):
    def broken(request):
        raise LookupError("mine")

    def run(index):
        steps = 0
        try:
            with join(index) as island:
                params = island.begin(PARAMS)
                for steps in itertools.count(1):
                    params = island.step(towards(params))
                    if steps == 10 and index == 0:
                        monkeypatch.setattr(join.store, "perform", broken)
                        until(lambda: island._exchanging.island.error)
        except Exception as error:
            return steps, error

    (one, other), _ = together(monkeypatch, run)
    assert one[0] == other[0] == 11
    assert isinstance(one[1], LookupError)
    # Of a kind that is not ours the others have the name.
    assert isinstance(other[1], RuntimeError) and str(other[1]) == "LookupError: mine"


def test_a_process_that_leaves_by_an_error_of_its_own_leaves_nobody_waiting(monkeypatch, join):
    def run(index):
        with join(index) as island:
            params = island.begin(PARAMS)
            for steps in itertools.count(1):
                if steps == 8 and index == 0:
                    raise KeyError("mine")
                params = island.step(towards(params))

    (one, other), _ = together(monkeypatch, run)
    assert isinstance(one, KeyError)
    assert isinstance(other, RuntimeError) and str(other) == "process 0 left the island: KeyError: 'mine'"
    # The folder is free.
    with gc.islands.join(join.store, PARAMS, name="a", folder=join.folder / "process-0", **OPTIONS):
        pass


def test_a_process_that_does_not_join_is_not_waited_for_for_ever(monkeypatch, join):
    monkeypatch.setattr(processes, "_JOIN_TIMEOUT_S", 0.1)
    for missing in (0, 1):
        found, _ = together(monkeypatch, lambda index, missing=missing: None if index == missing else join(index))
        (error,) = [error for error in found if error is not None]
        assert isinstance(error, SettingError)
        assert str(error).startswith(f"process {missing} did not join within 0.") and "all processes" in str(error)


def test_parameters_that_are_not_finite_are_given_up_once(monkeypatch, join):
    def run(index):
        with join(index) as island:
            params = island.begin(PARAMS)
            while island.diagnostics()["island/accepted"] < 1:
                params = island.step(towards(params))
                threading.Event().wait(0.002)
            params = jax.tree.map(lambda p: p * jnp.nan, params)
            while not np.isfinite(CODE.flat(params)).all():
                params = island.step(params)
            return bits(params), island.diagnostics()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        (one, other), _ = together(monkeypatch, run)
    assert not isinstance(one, BaseException), one
    assert one == other and one[1]["island/dropped"] == 1
    assert sum("not finite" in str(warning.message) for warning in told) == 1


def test_parameters_of_other_shapes_are_refused_before_they_are_gathered(monkeypatch, join):
    def run(index):
        with join(index) as island:
            params = island.begin(PARAMS)
            for _ in range(20):
                params = island.step({"w": jnp.ones((3, 3)), "b": params["b"]})

    found, _ = together(monkeypatch, run)
    one, other = raised(found)
    assert one == other and one[0] is ValueError and "other shapes" in one[1]
