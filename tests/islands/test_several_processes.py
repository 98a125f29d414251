"""Islands whose JAX programs have several processes: real ones, with parameters that lie in all of them."""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest

import gradcomp_jax as gc
from benchmarks.world.ledger import replay
from gradcomp_jax.islands.store import StoreError, open_store
from tests.islands import program
from tests.islands.process import CODE, PARAMS
from tests.islands.test_processes import FEWEST, ROOT, check, wait_for
from tests.network.processes import PATIENCE_S, environment, free_port, started, wait


class Program:
    """An island of so many processes."""

    def __init__(self, stack, place, name, folder, count):
        self.name, self.folder = name, folder / name
        logs = folder / f"{name}-{len(list(folder.iterdir()))}"
        address = f"127.0.0.1:{free_port()}"
        words = [sys.executable, program.__file__, str(place), name, str(self.folder), str(folder / "stop"), address]
        commands = [[*words, str(index), str(count)] for index in range(count)]
        self.running = stack.enter_context(started(logs, commands, [environment(2, PYTHONPATH=str(ROOT))] * count))

    def said(self, kind, index=0):
        lines = [json.loads(line) for line in self.running[index].stdout.splitlines() if line.startswith("{")]
        return [line for line in lines if line["kind"] == kind]

    def check_alive(self):
        for process in self.running:
            assert process.child.poll() in (None, 0), process.stderr[-3000:]

    def kill(self):
        for process in self.running:
            os.kill(process.child.pid, signal.SIGKILL)
            process.child.wait()


@pytest.fixture
def stack():
    with contextlib.ExitStack() as opened:
        yield opened


@pytest.mark.slow
def test_an_island_of_two_processes_and_one_of_one(tmp_path: Path, stack) -> None:
    pytest.importorskip("obstore")
    place = tmp_path / "run"
    store = open_store(place)

    def rounds(name=None):
        """How many there are, or how many of them have accepted an island."""
        try:
            return sum(name is None or name in [entry.island for entry in d.entries] for d in gc.islands.history(store))
        except StoreError:
            return 0

    a, b = Program(stack, place, "a", tmp_path, 2), Program(stack, place, "b", tmp_path, 1)
    wait_for(lambda: rounds("a") >= 3 and rounds("b") >= 3, [a, b])
    a.kill()
    begun = rounds()
    wait_for(lambda: rounds() >= begun + 2, [b])
    again = Program(stack, place, "a", tmp_path, 2)
    wait_for(lambda: rounds("a") >= 6 and rounds() >= FEWEST, [again, b])
    (tmp_path / "stop").touch()
    for island in (again, b):
        codes = wait(island.running, within_s=PATIENCE_S)
        assert not any(codes), "\n".join(process.stderr[-3000:] for process in island.running)
    (begun_again,) = again.said("begun")
    assert begun_again["restored"] and begun_again["round"] >= begun
    # The processes of an island have taken the same at the same time.
    for island in (a, again):
        one, other = ([*island.said("begun", i), *island.said("landed", i)] for i in range(2))
        many = min(len(one), len(other))
        assert many >= 2
        for mine, others in zip(one[:many], other[:many], strict=True):
            assert mine["round"] == others["round"]
            # A leaf in parts, of which each has two, and one of which each has two copies.
            parts = [line["own"][:2] for line in (mine, others)]
            copies = [line["own"][2:] for line in (mine, others)]
            assert len({*parts[0], *parts[1]}) == 4 and len({*copies[0], *copies[1]}) == 1
    assert len(again.said("landed")) == len(again.said("landed", 1))
    (one,), (other,) = again.said("end"), again.said("end", 1)
    assert one == other
    after = replay(store, gc.islands.codec(CODE, PARAMS))
    for island in (again, b):
        (centre,) = island.said("centre")
        assert centre["digest"] == after[centre["round"]].digest
    check(place, [again, b])


MISTAKES = """
import os, sys, jax, jax.numpy as jnp, numpy as np
import gradcomp_jax as gc
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P
place, index = sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(sys.argv[1], 2, index)
mesh = jax.make_mesh((4,), ("data",))
def laid(shape, dtype, spec):
    where = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(shape, where, lambda part: np.full(shape, 3, dtype)[part])
params = {
    "parts": laid((8, 6), np.float32, P("data")), "narrow": laid((8, 6), jnp.bfloat16, P(None)),
    "empty": laid((0, 4), np.float32, P()), "one": laid((), np.float32, P()),
    "mine": np.full((4, 4), 1 + index, np.float32), "local": jnp.full((4, 4), 1 + index, jnp.float32),
}
def run(name, timeout=None, **options):
    options = {"name": name, "folder": f"{place}-{name}-{index}", "poll": 0.05, "momentum": 0.0, "every": 4} | options
    code = gc.compressors.block_quantized(bits=4)
    try:
        with gc.islands.join(place, params, compressor=code, **options) as island:
            # The mesh of a training may be set.
            with jax.set_mesh(mesh):
                begun = island.begin(params, timeout=timeout)
            for leaf in jax.tree.leaves(begun):
                assert isinstance(leaf, jax.Array)
            for key in ("parts", "narrow", "empty", "one", "local"):
                assert begun[key].sharding == params[key].sharding and begun[key].dtype == params[key].dtype, key
            here = jax.tree.map(lambda leaf: float(np.asarray(leaf.addressable_data(0), np.float32).sum()), begun)
            print(here, flush=True)
            if name == "trains":
                while island.diagnostics()["island/accepted"] < 3:
                    begun = jax.tree.map(lambda leaf: leaf * leaf.dtype.type(0.99), begun)
                    with jax.set_mesh(mesh):
                        begun = island.step(begun)
                print(island.close(begun, timeout=60.0), flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
run("late", timeout=0.2, found=False)
run("founder")
run("momentum", momentum=0.5)
run("differs", every=4 + index)
run("trains")
from gradcomp_jax._compat import key_value_store
multihost_utils.sync_global_devices("all have read")
print("keys:", [k for k, text in key_value_store()[0].key_value_dir_get("gradcomp_jax/islands") if "left" not in text])
if index == 0:
    from gradcomp_jax._files import lock_file
    os.makedirs(f"{place}-locked-0")
    held = lock_file(__import__("pathlib").Path(f"{place}-locked-0/island.lock"), wait=False)
run("locked")
# What lies in one process only.
params["parts"] = jax.make_array_from_callback(
    (8, 6), NamedSharding(jax.make_mesh((2,), ("data",), devices=jax.devices()[2:]), P("data")),
    lambda part: np.zeros((8, 6), np.float32)[part], dtype=np.float32)
run("elsewhere")
"""


@pytest.mark.slow
def test_mistakes_are_said_in_all_processes_and_what_the_first_has_is_placed(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    address = f"127.0.0.1:{free_port()}"
    commands = [[sys.executable, "-c", MISTAKES, address, str(tmp_path / "run"), str(i)] for i in range(2)]
    with started(tmp_path / "logs", commands, [environment(2, PYTHONPATH=str(ROOT))] * 2) as running:
        codes = wait(running, within_s=PATIENCE_S)
        assert codes == [0, 0], running[0].stderr[-3000:] + running[1].stderr[-3000:]
    one, other = ([line for line in process.stdout.splitlines() if line[0] != "["] for process in running)
    assert one == other, (one, other)
    late, founder, momentum, differs, trains, sent, left, locked, elsewhere = one
    assert late.startswith("TimeoutError: there was no centre within 0.2 s")
    # Process 0's own leaves count, and each has them.
    assert founder == "{'empty': 0.0, 'local': 16.0, 'mine': 16.0, 'narrow': 144.0, 'one': 3.0, 'parts': 36.0}"
    assert momentum.startswith("IslandError: ") and "the run has momentum 0.0, not 0.5" in momentum
    assert differs.startswith(
        "SettingError: every is 4 in process 0 and 5 in process 1: all processes of a JAX program"
    )
    assert trains == founder and sent == "True"
    assert left == "keys: []"
    assert locked.startswith("SettingError: another process is the island of")
    assert elsewhere.startswith("SettingError: a parameter lies in some processes of this island and not in others")
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert folders == [
        "logs",
        "run",
        *(f"run-{name}-0" for name in ("founder", "late", "locked", "momentum", "trains")),
    ]
