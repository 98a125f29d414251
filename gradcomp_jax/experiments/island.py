"""A problem that is trained by one island of a run, and what came of each round."""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from gradcomp_jax._errors import SettingError
from gradcomp_jax._files import read_file
from gradcomp_jax.experiments import recipes
from gradcomp_jax.experiments.problem import Problem
from gradcomp_jax.experiments.run import data_mesh
from gradcomp_jax.experiments.settings import Settings
from gradcomp_jax.islands import Member
from gradcomp_jax.training import data_sharding, init_state, make_train_step

METRICS = "metrics.jsonl"
"""The file in an island's folder that has a line for each round which the island landed."""

_LARGEST = 1 << 28


@dataclasses.dataclass(frozen=True)
class Landed:
    """Says how an island does when its training has taken the centre of a round. Counts are of this process.

    Attributes:
        island: its name.
        round: the last round that it has taken the centre of.
        seconds: since this process began to train.
        steps: that this process made.
        loss: mean over the steps since the round before; ``None`` if it is not finite, or there were no steps.
        kept_norm: norm of what the island has not sent.
        accepted: rounds that accepted its payload.
        late: rounds that did not.
        bytes_written: of payloads.
        bytes_read: of payloads and snapshots.
        hidden_seconds: that the exchange took beside training.
    """

    island: str
    round: int
    seconds: float
    steps: int
    loss: float | None
    kept_norm: float
    accepted: int
    late: int
    bytes_written: int
    bytes_read: int
    hidden_seconds: float


class IslandTraining:
    """Trains a problem on the devices of one island, with a dense exchange between them.

    Attributes:
        state: of the training.
    """

    def __init__(self, problem: Problem, settings: Settings, seed: int) -> None:
        """Makes the initial state. The learning rate is constant: nobody knows how long a run of islands is."""
        self.problem, self.seed = problem, seed
        self.settings = dataclasses.replace(settings, schedule="constant")
        tx = recipes.build("dense", self.settings, problem.steps_per_epoch(settings), seed=seed)
        axis: dict[str, Any] = {"axis_name": settings.axis_name}
        mesh = data_mesh(settings.workers, settings.axis_name)
        self._sharding = data_sharding(mesh, **axis)
        self._step = make_train_step(problem.loss, tx, mesh, **axis)
        self.state = init_state(problem.init(seed), tx, mesh, **axis)

    def rounds(self, island: Member, name: str, last: int, each: Callable[[], None]) -> Iterator[Landed]:
        """Trains until the run has had ``last`` rounds; yields at the start, and whenever training has taken a centre.

        ``each`` is called after every step. The examples are drawn in the order of another epoch after a restart.
        """
        self.state = self.state._replace(params=island.begin(self.state.params))
        started, steps, losses = time.monotonic(), 0, list[float]()
        number = int(island.diagnostics()["island/round"])
        yield self._landed(island, name, number, 0.0, steps, losses)
        for epoch in itertools.count(number):
            for batch in self.problem.batches(self.settings, self.seed, epoch):
                if number >= last:
                    return
                self.state, metrics = self._step(self.state, jax.device_put(batch, self._sharding))
                losses.append(float(metrics["loss"]))
                steps += 1
                # Asked for before the step of the island, which takes this centre if not a newer one.
                there = int(island.diagnostics()["island/round"])
                self.state = self.state._replace(params=island.step(self.state.params))
                each()
                if there > number:
                    number = there
                    yield self._landed(island, name, number, time.monotonic() - started, steps, losses)
                    losses.clear()

    @staticmethod
    def _landed(island: Member, name: str, number: int, seconds: float, steps: int, losses: list[float]) -> Landed:
        found = {key.removeprefix("island/"): value for key, value in island.diagnostics().items()}
        mean = float(np.mean(losses)) if losses else math.nan
        return Landed(
            island=name,
            round=number,
            seconds=round(seconds, 3),
            steps=steps,
            loss=mean if math.isfinite(mean) else None,
            kept_norm=found["kept_norm"],
            accepted=int(found["accepted"]),
            late=int(found["late"]),
            bytes_written=int(found["bytes_written"]),
            bytes_read=int(found["bytes_read"]),
            hidden_seconds=round(found["hidden_seconds"], 3),
        )


def append_metrics(folder: pathlib.Path, landed: Landed) -> None:
    """Adds a line to the metrics of an island, on a line of its own also after one that was cut off."""
    line = json.dumps(dataclasses.asdict(landed), allow_nan=False) + "\n"
    with open(folder / METRICS, "ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else "\n" + line
        file.write(line.encode())


def read_metrics(path: pathlib.Path) -> list[Landed]:
    """Returns what is in a file of metrics, or in that of an island's folder; lines that were cut off are left out.

    Raises:
        SettingError: if there is no such file, or nothing in it is a line of metrics.
    """
    file = path / METRICS if path.is_dir() else path
    try:
        content = read_file(file, limit=_LARGEST, follow=True)
    except OSError as error:
        raise SettingError(f"cannot read {file}: {error.strerror}") from error
    if content is None:
        raise SettingError(f"there is no {file}: name the folder of an island, which has its {METRICS}")
    found = []
    for line in content.decode(errors="replace").splitlines():
        try:
            found.append(Landed(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    if content.strip() and not found:
        raise SettingError(f"{file} has no line of metrics: name the folder of an island, which has its {METRICS}")
    return found
