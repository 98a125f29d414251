"""Three real processes on one machine: one killed and restarted, one late; over a folder and over a bucket."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import gradcomp_jax as gc
from benchmarks.world import ledger
from gradcomp_jax.islands import keys
from gradcomp_jax.islands.store import StoreError, open_store
from tests.islands import process
from tests.islands.process import CODE, PARAMS

ROOT = Path(__file__).parents[2]
FEWEST = 12


class Island:
    def __init__(self, place, name, folder, options=None):
        self.name, self.folder, self.lines = name, folder / name, []
        self.log = folder / f"{name}.{time.monotonic_ns()}.txt"
        environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        command = [
            sys.executable,
            process.__file__,
            str(place),
            name,
            str(self.folder),
            str(folder / "stop"),
            json.dumps(options),
        ]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

    def said(self, kind):
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["kind"] == kind]

    def wait(self):
        assert self.process.wait(240) == 0, self.log.read_text()[-3000:]

    def check_alive(self):
        assert self.process.poll() in (None, 0), self.log.read_text()[-3000:]


def wait_for(condition, islands, seconds=240.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        for island in islands:
            island.check_alive()
        time.sleep(0.05)


def check(place, islands, options=None):
    store, codec = open_store(place, **(options or {})), gc.islands.codec(CODE, PARAMS)
    log = gc.islands.history(store)
    assert [d.round for d in log] == list(range(1, len(log) + 1)) and len(log) >= FEWEST
    after = ledger.replay(store, codec)
    assert len(after) == len(log) + 1
    number, centre = gc.islands.follow(place, PARAMS, compressor=CODE, store_options=options).update()
    assert number == len(log)
    first, last = process.loss(PARAMS, TEST), process.loss(centre, TEST)
    print(f"{len(log)} rounds; loss {float(first):.4f} before, {float(last):.4f} after")
    assert last < 0.7 * first
    for island in islands:
        error, seen = ledger.errors(store, codec, island.name, island.folder)
        print(
            f"{island.name}: accepted + kept + in flight = encoded to {error:.1e}, + since departure = moved to {seen:.1e}"
        )
        assert error < 1e-5 and seen < 1e-5
    took_part = {island.name: sum(island.name in [e.island for e in d.entries] for d in log) for island in islands}
    print("rounds with each:", took_part)
    assert min(took_part.values()) >= 3


TEST = np.random.default_rng(9).normal(size=(256, 16)).astype(np.float32)


def lose_the_folder(place):
    """As a disk that is not mounted for a while: an empty folder may come to its place, and be written to."""
    away, stub = place.with_name("away"), place.with_name("stub")
    place.rename(away)
    time.sleep(2.0)
    if place.exists():
        place.rename(stub)
    away.rename(place)
    # A request that was under way may have gone there: it counts for nothing, as the check at the end shows.
    assert len(list(stub.rglob("round/*"))) <= 1


def run_three(place, folder, options=None):
    store = open_store(place, **(options or {}))

    def rounds():
        try:
            return len(store.names(keys.ROUNDS))
        except StoreError:
            return 0

    a, b = Island(place, "a", folder, options), Island(place, "b", folder, options)
    try:
        wait_for(lambda: rounds() >= 6, [a, b])
        b.process.send_signal(signal.SIGKILL)
        b.process.wait()
        c = Island(place, "c", folder, options)
        wait_for(lambda: rounds() >= 10, [a, c])
        again = Island(place, "b", folder, options)
        wait_for(lambda: c.said("begun") and again.said("begun"), [a, c, again])
        if not options:
            lose_the_folder(Path(place))
        c.process.send_signal(signal.SIGSTOP)
        begun = rounds()
        wait_for(lambda: rounds() >= begun + 4, [a, again])
        c.process.send_signal(signal.SIGCONT)
        begun = rounds()
        wait_for(lambda: rounds() >= begun + 8, [a, c, again])
        (folder / "stop").touch()
        for island in (a, again, c):
            island.wait()
    finally:
        for island in [a, b, *(x for x in (locals().get("c"), locals().get("again")) if x)]:
            island.process.kill()
    assert again.said("begun")[0]["restored"] and again.said("begun")[0]["round"] >= 6
    assert c.said("begun")[0]["round"] >= 5
    check(place, [a, again, c], options)


@pytest.mark.slow
def test_three_processes_over_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    user = tmp_path / "mine.txt"
    user.write_text("mine")
    run_three(tmp_path / "run", tmp_path)
    assert user.read_text() == "mine"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"configuration", "round", "centre", "island"}


@pytest.mark.slow
def test_three_processes_over_a_bucket(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    server = pytest.importorskip("moto.server", reason="no S3 server: pip install -e '.[bench]'")
    running = server.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    running.start()
    try:
        host, port = running.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).read()
        options = {
            "endpoint": endpoint,
            "access_key_id": "key",
            "secret_access_key": "secret",
            "region": "us-east-1",
            "client_options": {"allow_http": True},
        }
        store = open_store("s3://bucket/other", **options)
        assert store.create("mine", b"1") and not store.create("mine", b"2")
        run_three("s3://bucket/run", tmp_path, options)
        assert store.names("") == {"mine": 1}
    finally:
        running.stop()
