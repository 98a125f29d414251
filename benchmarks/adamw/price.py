"""Prices in steps from the protocol's runs: the planner weighs a method's steps by them."""

import statistics

from benchmarks.adamw.rows import ROWS
from benchmarks.adamw.runs import Results
from benchmarks.adamw.table import BASELINE, dense_steps, losses
from benchmarks.adamw.task import WORKERS
from benchmarks.training.prices import figure
from gradcomp_jax.planning.prices import Price


def prices(found: Results, *, task: str, page: str) -> dict[str, list[Price]]:
    """Returns the price of each registered method that has runs, from the longest of them.

    The price is the run's steps over those at which dense AdamW has the same loss. A run that ended above dense's shortest one
    has a lower bound.

    Args:
        found: the runs.
        task: what the package calls it.
        page: that has them.
    """
    made: dict[str, list[Price]] = {}
    shortest = losses(BASELINE, found.task.lengths[-1], found)
    for name, row in ROWS.items():
        steps = next((n for n in found.task.lengths if losses(name, n, found) and losses(BASELINE, n, found)), None)
        if not row.method or steps is None or not shortest:
            continue
        own = losses(name, steps, found)
        reached = statistics.fmean(own.values()) <= statistics.fmean(shortest.values())
        factors = {seed: steps / dense_steps(loss, found) for seed, loss in own.items()}
        mean = steps / (dense_steps(statistics.fmean(own.values()), found) if reached else found.task.lengths[-1])
        spread = (figure(min(factors.values())), figure(max(factors.values()))) if len(own) > 1 and reached else None
        price = Price(
            figure(mean),
            reached,
            spread,
            task=f"{task}, {steps:,} steps",
            kind="transformer",
            optimizer="adamw",
            workers=WORKERS,
            seeds=len(own),
            options=row.options,
            page=page,
            dense_steps=row.dense,
        )
        made.setdefault(row.method, []).append(price)
    return made
