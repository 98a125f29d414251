"""Throughput over time: of a run to which nothing happens, with a worker that pauses, and with one that is gone and comes back.

A process that is gone ends the others, and all are started again from the checkpoint: so the library recovers.
"""

import contextlib
import dataclasses
import itertools
import pathlib
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.sweep.team import START_S
from benchmarks.world.goodput import Run
from benchmarks.world.workers import Workers
from gradcomp_jax import _markdown

NOTHING, PAUSED, GONE = "nothing", "one paused", "one gone and back"
FAULTS = (NOTHING, PAUSED, GONE)
HIT = 1
"""The worker to which it happens. Worker 0 coordinates."""
END_S = 120.0
"""Within which the others must have ended."""

Start = Callable[[], contextlib.AbstractContextManager[Workers]]
Done = tuple[int, int, float]
"""Of one step: the worker, the step's number, and the moment at which it was done."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long, and when.

    Attributes:
        seconds: about how long a run takes to which nothing happens, without its checkpoints.
        pause_s: seconds of the pause.
        bin_s: seconds of a row of the table.
    """

    seconds: float
    pause_s: float
    bin_s: float = 2.0


def measure(start: Start, shape: Callable[[], None], name: str, plan: Plan) -> dict[str, dict[str, Any]]:
    """What each fault does to a strategy, by the fault.

    Args:
        start: starts the workers, in the same places each time.
        shape: makes the links what they are to be.
        name: of the strategy.
        plan: how long, and when.
    """
    found = {}
    with start() as team:
        run = Run(team, name)
        shape()
        run.warm_up()
        # Enough steps that exchanges are in them as often as in a long run.
        period = max(run.strategy.period, 4)
        total = max(6, round(plan.seconds * period / run.stretch(period, 1)[0]))
        first = run.done
        with tempfile.TemporaryDirectory() as folder:
            # The first checkpoint of a process loads what writes it.
            _tell(team, folder, first, first, 3)
            team.answers()
        first += 3
        with tempfile.TemporaryDirectory() as folder:
            found[NOTHING] = _whole(team, folder, first, total, plan, lambda reached: {})
        first += total
        with tempfile.TemporaryDirectory() as folder:

            def pause(reached: Callable[[int], float]) -> dict[str, float]:
                hit = reached(total // 5)
                team.processes[HIT].send_signal(signal.SIGSTOP)
                time.sleep(plan.pause_s)
                team.processes[HIT].send_signal(signal.SIGCONT)
                return {"hit_s": hit, "pause_s": plan.pause_s}

            found[PAUSED] = _whole(team, folder, first, total, plan, pause)
        first += total
        with tempfile.TemporaryDirectory() as folder:
            found[GONE] = _gone(start, team, name, folder, first, total, plan)
    return found


def _whole(
    team: Workers,
    folder: str,
    first: int,
    total: int,
    plan: Plan,
    happens: Callable[[Callable[[int], float]], Mapping[str, float]],
) -> dict[str, Any]:
    """A run that all processes live through."""
    at = _tell(team, folder, first, first, total)
    more = happens(lambda steps: _reached(folder, first + steps) - at)
    team.answers()
    return series(_read(folder, team.workers), at, plan.bin_s) | more


def _gone(start: Start, team: Workers, name: str, folder: str, first: int, total: int, plan: Plan) -> dict[str, Any]:
    """A run in which a process is killed, and all are started again when the others have ended."""
    at = _tell(team, folder, first, first, total)
    killed = _reached(folder, first + total * 11 // 20)
    team.processes[HIT].kill()
    for process in team.processes:
        process.wait(max(0.0, killed + END_S - time.monotonic()))
    ended = time.monotonic()
    made = max(number for _, number, _ in _read(folder, team.workers)) + 1
    with start() as again:
        again.order("begin", name)
        # A state counts its steps: the number of the first one that is not in the checkpoint.
        restored = again.order("restore", folder)[0]
        _tell(again, folder, restored, first, total)
        again.answers()
    done = _read(folder, team.workers)
    back = min(moment for _, _, moment in done if moment > ended)
    seen = {"hit_s": killed - at, "ended_s": ended - killed, "back_s": back - killed, "lost_steps": made - restored}
    return series(done, at, plan.bin_s) | seen


def _tell(team: Workers, folder: str, number: int, first: int, total: int) -> float:
    """Has a team train from a step on; the run's checkpoints are after a third and two thirds. Returns when it begins."""
    at = time.monotonic() + START_S
    team.tell("train", number, first + total, [first + total // 3, first + 2 * total // 3], folder, at)
    return at


def _reached(folder: str, number: int) -> float:
    """Waits until the worker to which it happens has done a step; returns the moment at which that was seen.

    Raises:
        TimeoutError: if it does not within :data:`END_S`.
    """
    until = time.monotonic() + END_S
    while not any(worker == HIT and done >= number for worker, done, _ in _read(folder, HIT + 1)):
        if time.monotonic() > until:
            raise TimeoutError(f"worker {HIT} has not done step {number} within {END_S:g} s")
        time.sleep(0.02)
    return time.monotonic()


def _read(folder: str, workers: int) -> list[Done]:
    """Every step that is in the workers' files."""
    found = []
    for worker in range(workers):
        path = pathlib.Path(folder, f"steps-{worker}")
        for line in path.read_text().splitlines() if path.exists() else ():
            number, moment = line.split()
            found.append((worker, int(number), float(moment)))
    return found


def series(done: Iterable[Done], at: float, bin_s: float) -> dict[str, Any]:
    """Steps of all workers in each stretch of ``bin_s`` seconds from a moment on, and the seconds until the last one.

    A step that is done again counts once, the first time: what was lost is no throughput.
    """
    first: dict[tuple[int, int], float] = {}
    for worker, number, moment in done:
        first[worker, number] = min(moment, first.get((worker, number), moment))
    seconds = max(first.values()) - at
    steps = [0] * (int(seconds // bin_s) + 1)
    for moment in first.values():
        steps[int((moment - at) // bin_s)] += 1
    return {"seconds": seconds, "bin_s": bin_s, "steps": steps}


def pending(results: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Strategies whose faults have not all been measured."""
    done = {(f["strategy"], f["fault"]) for f in results["faults"]}
    return [name for name in names if not {(name, fault) for fault in FAULTS} <= done]


def tables(results: Mapping[str, Any]) -> list[str]:
    """Each run as a whole, what a loss cost, and examples a second over time."""
    found = results["faults"]
    if not found:
        return ["Faults are not measured."]
    batch, by = results["batch"], {(f["strategy"], f["fault"]): f for f in found}
    rows = []
    for f in found:
        free = by[f["strategy"], NOTHING]["seconds"]
        rate = batch * sum(f["steps"]) / f["seconds"]
        rows.append(
            (f["strategy"], f["fault"], f"{f['seconds']:.1f} s", f"{rate:,.0f}/s", f"{free / f['seconds']:.0%}")
        )
    lines = _markdown.table(("strategy", "what happens", "run", "throughput", "share"), rows, align="llr")
    lines += ["", *(line for f in found for line in _said(f))]
    bin_s = found[0]["bin_s"]
    head = [f"{f['strategy']}: {f['fault']}" for f in found]
    rates = [
        [f"{batch * f['steps'][i] / bin_s:,.0f}" if i < len(f["steps"]) else "" for f in found]
        for i in range(max(len(f["steps"]) for f in found))
    ]
    times, start = [], 0
    # One row for the time until all are back.
    for row, alike in itertools.groupby(rates):
        end = start + len(list(alike))
        times.append((f"{start * bin_s:g} .. {end * bin_s:g}", *row))
        start = end
    return [*lines, "", *_markdown.table(("seconds", *head), times, align="r")]


def _said(f: Mapping[str, Any]) -> list[str]:
    if f["fault"] == PAUSED:
        return [f"- {f['strategy']}: worker {HIT} was paused after {f['hit_s']:.1f} s, for {f['pause_s']:g} s."]
    if f["fault"] == GONE:
        return [
            f"- {f['strategy']}: worker {HIT} was killed after {f['hit_s']:.1f} s; {f['ended_s']:.1f} s later all had ended,"
            f" {f['back_s']:.1f} s after the kill all were started again and the first step was done, {f['lost_steps']} steps"
            " were done again."
        ]
    return []
