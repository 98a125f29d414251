"""The whole sweep: one team of processes for each model and number of workers, cell after cell, kept in a file."""

import contextlib
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import lab

from .links import Cell
from .measure import MOST, Clock, compression, measure
from .methods import NOTHING
from .tasks import TASKS
from .team import Team

Results = dict[str, Any]
EMPTY: Results = {"machine": {}, "versions": {}, "cells": [], "training": {}}


def load(path: Path | None) -> Results:
    """What an earlier run has kept, or nothing."""
    if path is None or not path.exists():
        return json.loads(json.dumps(EMPTY))
    return json.loads(path.read_text())


def pending(cells: Iterable[Cell], results: Results, names: Sequence[str]) -> list[Cell]:
    """Cells that have not been measured with all of these methods."""
    done = {c["key"] for c in results["cells"] if set(names) <= set(c["methods"])}
    return [cell for cell in cells if cell.key not in done]


class Sweep:
    """Measures cells and writes the file after each.

    Args:
        results: is added to.
        path: of the JSON file, or ``None``.
        names: of the methods.
        rounds: timed steps of each method in a cell, at least.
        seconds: for which a cell's rounds go on, see :func:`measure`.
        shaped: whether there are namespaces.
    """

    def __init__(
        self,
        results: Results,
        path: Path | None,
        names: Sequence[str],
        *,
        rounds: int,
        seconds: float,
        shaped: bool,
    ) -> None:
        self._results, self._path, self._names, self._shaped = results, path, names, shaped
        self._rounds, self._seconds = rounds, seconds
        self._started = time.monotonic()

    def run(self, cells: Sequence[Cell], train: Sequence[tuple[str, int]]) -> None:
        """Measures the cells, and trains each ``(model, workers)`` of ``train`` on links that are not shaped."""
        groups = list(dict.fromkeys([*((c.model, c.workers) for c in cells), *train]))
        for number, (model, workers) in enumerate(groups, 1):
            own = [c for c in cells if (c.model, c.workers) == (model, workers)]
            self._say(f"{model}, {workers} workers ({number} of {len(groups)}): starting, compiling")
            with contextlib.ExitStack() as stack:
                net = stack.enter_context(lab.Network(workers)) if self._shaped else None
                team = stack.enter_context(Team(model, workers, net))
                self._group(team, net, model, own, train=(model, workers) in train)

    def _group(self, team: Team, net: lab.Network | None, model: str, cells: list[Cell], *, train: bool) -> None:
        team.compile(NOTHING)
        facts = {}
        for name in self._names:
            facts[name] = team.compile(name)
            self._say(f"  {name} compiled")
        self._results["machine"], self._results["versions"] = team.facts["machine"], team.facts["versions"]
        if train:
            self._train(team, model)
        if not cells:
            return
        clock = Clock()
        alone = compression(team, self._names, clock)
        for index, cell in enumerate(cells):
            start = time.monotonic()
            found = measure(cell, team, net, facts, alone, clock, rounds=self._rounds, seconds=self._seconds)
            kept = [c for c in self._results["cells"] if c["key"] != cell.key]
            self._results["cells"] = [*kept, found]
            self._save()
            # Of this group: how much a step takes on slower links follows from the bytes.
            left = sum(self._guess(c, found, facts) for c in cells[index + 1 :])
            times = ", ".join(f"{name} {m['step_s']:.2f}" for name, m in found["methods"].items())
            took = time.monotonic() - start
            self._say(f"  {cell.key}: {took:.0f} s; {times} s; this group needs about {left / 60:.1f} min more")

    def _guess(self, cell: Cell, found: Results, facts: dict[str, Any]) -> float:
        wire = sum(8 * f["sent"] / cell.rate for f in facts.values()) if cell.rate else 0.0
        # A collective of N workers takes about four delays for each of its rounds.
        waits = 4 * cell.delay_s * sum(sum(f["collectives"].values()) for f in facts.values()) * (cell.workers - 1)
        once = wire + waits + (len(facts) + 1) * found["nothing_s"] * 1.3
        return once * (1 + min(MOST, max(self._rounds, 1 + self._seconds / once)))

    def _train(self, team: Team, model: str) -> None:
        losses = {}
        for name in self._names:
            start = time.monotonic()
            losses[name] = [round(team.step(name, number).loss, 4) for number in range(TASKS[model].train_steps)]
            self._say(f"  {name} trained: loss {losses[name][-1]:.3f}, {time.monotonic() - start:.0f} s")
        self._results["training"][model] = {"workers": team.workers, "source": team.facts["source"], "losses": losses}
        self._save()

    def _save(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(_short(self._results), indent=1) + "\n")

    def _say(self, text: str) -> None:
        print(f"[{(time.monotonic() - self._started) / 60:5.1f} min] {text}", flush=True)


def _short(value: Any) -> Any:
    """Six figures are more than any of them has."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_short(v) for v in value]
    return value
