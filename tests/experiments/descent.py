"""A run without networks: what saves and goes on is that of real ones, and nothing is compiled."""

import dataclasses
import os
import pathlib
import types

import jax
import numpy as np
import pytest

from gradcomp_jax.experiments import Listener, Past, RunResult, Settings, Wire, train_with_checkpoints
from gradcomp_jax.experiments.results import step_time

STEPS = 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    step: np.ndarray
    w: np.ndarray


class Descent:
    """Stands for a ``Trainer``: four epochs of two steps that depend on the seed and the state, and compile nothing."""

    method, steps_per_epoch = "dense", STEPS
    settings = Settings(
        workers=2, epochs=4, batch_per_worker=2, learning_rate=0.1, clip_norm=None, warm_up_epochs=0, density=0.1
    )
    problem = types.SimpleNamespace(name="here:descent", metric="training loss")

    def initial_state(self, seed: int) -> State:
        return State(np.zeros((), np.int32), np.random.default_rng(seed).normal(size=1000))

    def run(self, seed: int, *, listener: Listener, past: Past | None = None) -> RunResult:
        past = past or Past(self.initial_state(seed))
        state, loss, evaluation = past.state, list(past.loss), list(past.evaluation)
        for epoch in range(int(state.step) // STEPS, self.settings.epochs):
            for _ in range(STEPS):
                state = State(np.asarray(state.step + 1), state.w * 0.9 + 0.01 * np.sin(state.w))
                loss.append(float(np.square(state.w).mean()))
                listener.stepped(self.method, seed, len(loss), loss[-1])
            evaluation.append(loss[-1])
            past = Past(state, tuple(loss), tuple(evaluation), (1.0,) * len(loss), "training loss")
            listener.finished_epoch(self.method, seed, epoch + 1, past)
        return self.result(seed, past)

    def result(self, seed: int, past: Past) -> RunResult:
        times = step_time(past.seconds)
        same = {"method": self.method, "dataset": self.problem.name, "seed": seed, "settings": self.settings}
        return RunResult(**same, loss=past.loss, evaluation=past.evaluation, wire=Wire(1, 1.0, 1), step_time=times)


def longer(epochs: int) -> Descent:
    trainer = Descent()
    trainer.settings = dataclasses.replace(Descent.settings, epochs=epochs)
    return trainer


class Stop(Exception):
    """Breaks a run off."""


class After(Listener):
    """Does something after an epoch is saved, by default breaks the run off; counts steps."""

    def __init__(self, epoch: int = 10**9, action=None) -> None:
        self.epoch, self.action, self.steps = epoch, action, 0

    def stepped(self, method, seed, step, loss) -> None:
        self.steps += 1

    def finished_epoch(self, method, seed, epoch, past) -> None:
        if epoch == self.epoch:
            if self.action is None:
                raise Stop
            self.action()


def stopped(trainer, folder: pathlib.Path, epoch: int) -> None:
    with pytest.raises(Stop):
        train_with_checkpoints(trainer, 0, folder, listener=After(epoch))


def everything_in(folder: pathlib.Path) -> dict[str, object]:
    """All that is there: contents of files, targets of links."""
    found = {}
    for path in sorted(folder.rglob("*")):
        is_file = path.is_file() and not path.is_symlink()
        found[str(path)] = os.readlink(path) if path.is_symlink() else path.read_bytes() if is_file else None
    return found


def thesis(path: pathlib.Path) -> None:
    path.mkdir()
    (path / "chapter-1.tex").write_text("mine")


def link(path: pathlib.Path) -> None:
    thesis(path.parent.parent / f"elsewhere-{path.name}")
    path.symlink_to(path.parent.parent / f"elsewhere-{path.name}")


def link_to_file(path: pathlib.Path) -> None:
    path.with_name("..").joinpath("diary").write_text("mine")
    path.symlink_to(path.parent.parent / "diary")


def notes(path: pathlib.Path) -> None:
    path.write_text("mine")
