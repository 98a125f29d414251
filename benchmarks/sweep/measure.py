"""One cell: rounds of interleaved steps, and what the interfaces counted meanwhile."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import lab

from .bounds import HEADER, SEGMENT, bound_s, counted_range
from .links import Cell
from .methods import NOTHING
from .team import Team

LONG_S = 5.0
"""Beyond this, by bytes over rate, a step is taken twice and without one to warm up: it has the time to settle."""

MOST = 9
"""Timed rounds of a cell whose steps are short."""

Counts = tuple[int, int]
"""Of one worker: bytes that its interfaces have sent, and segments that its TCP has sent once more."""

Facts = Mapping[str, Mapping[str, Any]]


class Clock:
    """Numbers the steps of a team, so that no two are on the same batch."""

    def __init__(self) -> None:
        self._number = 0

    def next(self) -> int:
        self._number += 1
        return self._number


def compression(team: Team, names: Sequence[str], clock: Clock, turns: int = 3, rounds: int = 3) -> dict[str, float]:
    """Seconds of a step with a method's local round trip and no exchange: computation and compression.

    The least of all rounds: what a busy machine adds must not raise a bound. Methods take turns, because a machine is busy
    for longer than one's rounds.
    """
    seconds = dict.fromkeys(names, math.inf)
    for _ in range(turns):
        for name in names:
            # One more round makes the state and touches its memory.
            taken = [team.step(name, clock.next(), alone=True).seconds for _ in range(rounds + 1)]
            seconds[name] = min(seconds[name], *taken[1:])
            team.release()
    return seconds


def measure(
    cell: Cell,
    team: Team,
    net: lab.Network | None,
    facts: Facts,
    alone: Mapping[str, float],
    clock: Clock,
    *,
    rounds: int,
    seconds: float,
) -> dict[str, Any]:
    """What a step takes in this cell with every method of ``facts``, and without an exchange.

    Args:
        cell: shapes the links of ``net``.
        team: its workers have compiled the methods.
        net: ``None`` where there are no namespaces: then nothing is shaped, and bytes are not counted.
        facts: by method, what its program says.
        alone: of :func:`compression`.
        clock: of the team.
        rounds: timed steps of each method, at least.
        seconds: for which rounds go on, up to :data:`MOST`: short steps vary the most.
    """
    if net is not None:
        net.shape(cell.rate, cell.delay_s)
    long = {name: 8 * f["sent"] / (cell.rate or 1e15) > LONG_S for name, f in facts.items()}
    taken: dict[str, list[float]] = {name: [] for name in (NOTHING, *facts)}
    counted: dict[str, list[list[Counts]]] = {name: [] for name in facts}
    start = time.monotonic()
    for turn in range(MOST + 1):
        if turn > rounds and time.monotonic() - start > seconds:
            break
        for name in (NOTHING, *facts):
            if long.get(name) and not 1 <= turn <= 2:
                continue
            before = _counts(net)
            step = team.step(name, clock.next(), alone=name == NOTHING)
            if turn == 0:
                continue
            taken[name].append(step.seconds)
            if name != NOTHING:
                after = _counts(net)
                counted[name].append([(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, after, strict=True)])
    team.release()
    nothing = statistics.median(taken[NOTHING])
    return {
        "key": cell.key,
        "model": cell.model,
        "workers": cell.workers,
        "rate": cell.rate,
        "delay_s": cell.delay_s,
        "values": team.facts["values"],
        "source": team.facts["source"],
        "nothing_s": nothing,
        "nothing_range_s": [min(taken[NOTHING]), max(taken[NOTHING])],
        "methods": {name: _row(cell, facts[name], taken[name], counted[name], alone[name]) for name in facts},
    }


def _counts(net: lab.Network | None) -> list[Counts]:
    workers = [] if net is None else range(net.workers)
    return [(net.sent_bytes(worker), net.resent_segments(worker)) for worker in workers]


def _row(
    cell: Cell, facts: Mapping[str, Any], seconds: list[float], counted: list[list[Counts]], alone_s: float
) -> dict[str, Any]:
    step_s = statistics.median(seconds)
    row: dict[str, Any] = {
        "step_s": step_s,
        "range_s": [min(seconds), max(seconds)],
        "steps": len(seconds),
        "alone_s": alone_s,
        "bound_s": bound_s(alone_s, facts["sent"], cell.rate),
        "sent": facts["sent"],
        "collectives": facts["collectives"],
        "counted": None,
        "counted_most": None,
        "resent": None,
        "agrees": None,
    }
    if counted and counted[0]:
        # For each worker, the median over the steps: a step may hold another's late acknowledgements.
        by_worker = list(zip(*counted, strict=True))
        each = [statistics.median(sent for sent, _ in of_worker) for of_worker in by_worker]
        resent = [(SEGMENT + HEADER) * statistics.median(n for _, n in of_worker) for of_worker in by_worker]
        launched = sum(facts["collectives"].values())
        least, most = counted_range(facts["sent"], facts["received"], launched, cell.workers, step_s)
        row["counted"], row["counted_most"] = statistics.mean(each), max(each)
        row["resent"] = max(resent)
        row["agrees"] = all(least <= sent <= most + again for sent, again in zip(each, resent, strict=True))
    return row
