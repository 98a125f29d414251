"""Processes are killed, frozen and cut off at moments that nobody chose: all end in time, and the run goes on.

``GRADCOMP_FAULTS`` says how many runs, ``GRADCOMP_FAULT_SEED`` which; the seed of each is printed.
"""

import contextlib
import os
import pathlib
import random
import secrets
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from benchmarks import lab
from tests.network.processes import Process, environment, free_port, record, started, training, wait, wait_for_epoch
from tests.network.test_faults import BATCH, NEEDS, trainer, words

pytest.importorskip("typer")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

RUNS = int(os.environ.get("GRADCOMP_FAULTS", "1"))
SEED = int(os.environ.get("GRADCOMP_FAULT_SEED", secrets.randbelow(10**6)))
HEARTBEAT_S = 10
START_S = 20
"""Instead of the 300 s that a start may take."""
MARGIN_S = 15
PATIENCE_S = 400
"""For what is not measured here: four processes that start, compile and train on a busy machine."""

RUN = f"""
import sys
from gradcomp_jax.cli import main
from gradcomp_jax.distributed import cluster
cluster._START_TIMEOUT_S = {START_S}
main(sys.argv[1:])
"""


@contextlib.contextmanager
def running_with(folder: pathlib.Path, count: int, kind: str) -> Iterator[tuple[list[Process], lab.Network | None]]:
    """A run of more epochs than there is time for; on links of its own where one is to be cut."""
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(lab.Network(workers=count, rate=1e9)) if kind == "cut" else None
        address = net.coordinator if net else f"127.0.0.1:{free_port()}"
        line = words(folder / "saved", epochs=10_000, heartbeat=HEARTBEAT_S)
        commands = [
            [
                *(sys.executable, "-c", RUN, "train", "--distributed", "--coordinator", address, *line),
                *("--process-id", str(index), "--processes", str(count), "--out", str(folder / "out")),
            ]
            for index in range(count)
        ]

        def popen(index: int):
            return lambda argv, **options: net.popen(index, argv, **options)

        processes = started(folder, commands, [environment()] * count, popen if net else None)
        yield stack.enter_context(processes), net


def strike(process: Process, kind: str, net: lab.Network | None) -> None:
    if net:
        net.cut(process.index)
    else:
        process.child.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


@pytest.mark.network
@pytest.mark.parametrize("run", range(RUNS))
def test_a_fault_at_any_moment_ends_all_in_time_and_loses_nothing(run: int, tmp_path: pathlib.Path) -> None:
    draw = random.Random(f"{SEED} {run}")
    count, kind = draw.randint(2, 4), draw.choice(["kill", "freeze"] if NEEDS else ["kill", "freeze", "cut"])
    victim, trains, delay = draw.randrange(count), draw.random() < 0.6, draw.uniform(0, 1)
    delay *= 4 if trains else 25
    moment = f"{delay:.2f} s after {'an epoch was saved' if trains else 'the start'}"
    print(f"seed {SEED}, run {run}: {kind} process {victim} of {count}, {moment}")
    with running_with(tmp_path, count, kind) as (processes, net):
        if trains:
            wait_for_epoch(tmp_path / "saved", 1, processes, within_s=PATIENCE_S)
        time.sleep(delay)
        seen = record(tmp_path / "saved") if (tmp_path / "saved" / "run.json").is_file() else {"epoch": 0, "loss": []}
        strike(processes[victim], kind, net)
        start = time.monotonic()
        # One that is cut off ends by itself as well.
        others = [process for process in processes if kind == "cut" or process.index != victim]
        codes = wait(others, within_s=HEARTBEAT_S + MARGIN_S + (0 if seen["epoch"] else 2 * START_S))
        print(f"ended with {codes} within {time.monotonic() - start:.1f} s, epoch {seen['epoch']} was saved")
        assert all(codes)
        if seen["epoch"]:
            assert [len(process.sentences()) for process in others] == [1] * len(others)
        if kind == "freeze":
            processes[victim].child.send_signal(signal.SIGCONT)
            (code,) = wait([processes[victim]], within_s=HEARTBEAT_S + MARGIN_S + 2 * START_S)
            assert code
    before = record(tmp_path / "saved") if (tmp_path / "saved" / "run.json").is_file() else seen
    assert before["epoch"] >= seen["epoch"] and before["loss"][: len(seen["loss"])] == seen["loss"]
    epochs = before["epoch"] + 1
    with training(tmp_path, count, *words(tmp_path / "saved", epochs=epochs, heartbeat=100)) as again:
        assert wait(again, within_s=PATIENCE_S) == [0] * count, "".join(process.stderr for process in again)
    after = record(tmp_path / "saved")
    assert after["epoch"] == epochs and len(after["loss"]) == epochs * (1438 // BATCH)
    assert after["loss"][: len(before["loss"])] == before["loss"]
    if count == 2:
        # A sum of two does not depend on their order: the run that nobody disturbed, bit for bit.
        assert after["loss"] == list(trainer("topk-sgd", workers=2, epochs=epochs).run(0).loss)
