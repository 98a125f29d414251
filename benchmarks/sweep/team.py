"""The workers of one model, as the parent process sees them."""

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, ClassVar

from benchmarks import lab

ROOT = pathlib.Path(__file__).resolve().parents[2]
START_S = 0.02
"""Seconds from an order until the moment at which all workers start: enough for the order to reach them."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of all workers.

    Attributes:
        seconds: from the moment at which all were ready until the last one had the result.
        loss: the mean over the workers, nats.
    """

    seconds: float
    loss: float


class Team:
    """Starts ``workers`` processes, in the namespaces of ``net`` or, without one, on this machine's own loopback.

    Attributes:
        facts: what worker 0 says about the model, the data, the machine and the versions.
        processes: one for each worker, in order.
    """

    program = "benchmarks.sweep.worker"
    variables: ClassVar[dict[str, str]] = {}

    def __init__(self, model: str, workers: int, net: lab.Network | None) -> None:
        self.workers = workers
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.processes: list[subprocess.Popen] = []
        coordinator = f"127.0.0.1:{_free_port()}" if net is None else net.coordinator
        environment = {**self.variables, **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        for index in range(workers):
            argv = [sys.executable, "-m", self.program, coordinator, str(workers), str(index), model]
            start: Callable[..., subprocess.Popen] = subprocess.Popen
            if net is not None:
                start = _in(net, index)
            self.processes.append(
                start(
                    argv,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    text=True,
                    bufsize=1,
                    cwd=ROOT,
                    env=environment,
                )
            )
        self.facts = self.answers()[0]

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self._log.close()

    def compile(self, name: str) -> dict[str, Any]:
        """Compiles a method's steps; returns what its program says about bytes and collectives."""
        return self.order("compile", name)[0]

    def step(self, name: str, number: int, *, alone: bool = False) -> Step:
        """One step of all workers at once, on batch ``number``."""
        taken = self.order("step_alone" if alone else "step", name, number, time.monotonic() + START_S)
        start, end = max(t[0] for t in taken), max(t[1] for t in taken)
        return Step(end - start, sum(t[2] for t in taken) / self.workers)

    def release(self) -> None:
        """Drops the state of steps without an exchange."""
        self.order("release")

    def order(self, *words: Any) -> list[Any]:
        """Gives all workers an order; returns their answers."""
        self.tell(*words)
        return self.answers()

    def tell(self, *words: Any) -> None:
        """Gives all workers an order, and waits for nothing."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(words) + "\n")

    def answers(self) -> list[Any]:
        return [self._answer(index) for index in range(self.workers)]

    def _answer(self, index: int) -> Any:
        stdout = self.processes[index].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"worker {index} has stopped; the workers' last words:\n{self._log.read()[-3000:]}")
        return json.loads(line)


def _in(net: lab.Network, worker: int) -> Callable[..., subprocess.Popen]:
    def start(argv: list[str], **options: Any) -> subprocess.Popen:
        return net.popen(worker, argv, **options)

    return start


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
