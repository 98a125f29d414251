"""``gradcomp train --distributed`` in real processes, each with a log, none of which outlives its test."""

import contextlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from tests.xla_flags import xla_flags

_OWN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "XLA_FLAGS")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def environment(devices: int = 1, **more: str) -> dict[str, str]:
    """Of a process that has some CPU devices and compiles as quickly as the tests do."""
    kept = {name: value for name, value in os.environ.items() if name not in _OWN}
    # Wide enough that no sentence is broken into lines.
    return kept | {"XLA_FLAGS": xla_flags(devices), "JAX_PLATFORMS": "cpu", "COLUMNS": "200"} | more


class Process:
    """One process, with its standard streams in files."""

    def __init__(self, folder: pathlib.Path, index: int, argv: Sequence[str], env: dict[str, str], popen) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._out, self._err = folder / f"{index}.out", folder / f"{index}.err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.child: subprocess.Popen = popen(argv, env=env, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
        self.index = index

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def sentences(self) -> list[str]:
        """The lines that ``gradcomp`` itself wrote to stderr; at least one, if it comes within seconds.

        The last word of a process that was ended from within or without is another one's, a moment later.
        """
        until = time.monotonic() + 5
        while True:
            found = [line for line in self.stderr.splitlines() if line.startswith("gradcomp: ")]
            if found or time.monotonic() > until:
                return found
            time.sleep(0.05)


PATIENCE_S = 300
"""For what is not measured: processes that start, compile and train on a busy machine."""


@contextlib.contextmanager
def started(
    folder: pathlib.Path, commands: Sequence[Sequence[str]], environments, popen=None
) -> Iterator[list[Process]]:
    """One process for each command; what still runs at the end is killed."""
    running: list[Process] = []
    try:
        for index, (argv, env) in enumerate(zip(commands, environments, strict=True)):
            start = subprocess.Popen if popen is None else popen(index)
            running.append(Process(folder, index, argv, env, start))
        yield running
    finally:
        for process in running:
            if process.child.poll() is None:
                process.child.kill()
        for process in running:
            process.child.wait()


@contextlib.contextmanager
def training(
    folder: pathlib.Path, count: int, *words: str, devices: int = 1, coordinator: str | None = None, popen=None
) -> Iterator[list[Process]]:
    """``count`` processes of one training run, which are told of each other by options."""
    address = coordinator or f"127.0.0.1:{free_port()}"
    commands = [
        [
            *(sys.executable, "-m", "gradcomp_jax.cli", "train", "--distributed", "--coordinator", address),
            *("--process-id", str(index), "--processes", str(count), "--out", str(folder / f"out-{index}"), *words),
        ]
        for index in range(count)
    ]
    with started(folder, commands, [environment(devices)] * count, popen) as running:
        yield running


def wait(running: Sequence[Process], *, within_s: float) -> list[int]:
    """Exit codes; fails, with what the processes wrote, if one of them is not done in time."""
    until = time.monotonic() + within_s
    try:
        return [process.child.wait(max(0.0, until - time.monotonic())) for process in running]
    except subprocess.TimeoutExpired as error:
        logs = "\n".join(f"process {process.index}: {process.stderr[-2000:]}" for process in running)
        raise AssertionError(f"not done within {within_s} s:\n{logs}") from error


def record(folder: pathlib.Path) -> dict:
    """What a checkpoint folder says of its run: losses and accuracies in full precision."""
    return json.loads((folder / "run.json").read_text())


def wait_for_epoch(folder: pathlib.Path, epoch: int, running: Sequence[Process], *, within_s: float) -> None:
    """Until an epoch is saved."""
    until = time.monotonic() + within_s
    while not ((folder / "run.json").is_file() and record(folder)["epoch"] >= epoch):
        alive = all(process.child.poll() is None for process in running)
        assert alive and time.monotonic() < until, "\n".join(process.stderr[-2000:] for process in running)
        time.sleep(0.05)


def steps_shown(process: Process) -> int:
    """Steps that a process without a terminal says it has made, at its end, beyond those that were saved before."""
    saved = max((int(step) for step in re.findall(r"goes on after step (\d+) of", process.stderr)), default=0)
    return max((int(step) for step in re.findall(r"step (\d+)/\d+", process.stderr)), default=saved) - saved
