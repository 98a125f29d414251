"""Tables of what the runs gave, against dense AdamW with the same batches."""

import bisect
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats

from benchmarks.adamw.rows import ROWS
from benchmarks.adamw.runs import ALL_SEEDS, Results, best_rate
from benchmarks.adamw.train import Run
from gradcomp_jax import _markdown

BASELINE = "dense"
NO_WORSE_THAN = 0.01
"""The gap that "trains like" is tested against."""


def losses(name: str, steps: int, found: Results, part: str = "test") -> dict[int, float]:
    """Returns bits per character by seed, at the tuned rate."""
    rate = best_rate(name, ROWS[name], found)
    if rate is None:
        return {}
    runs = {seed: Run(name, rate, steps, seed).name for seed in ALL_SEEDS}
    return {seed: float(found.runs[run][part]) for seed, run in runs.items() if run in found.runs}


def gaps(name: str, steps: int, found: Results) -> list[float]:
    """Returns what a row has above dense AdamW, as a fraction, for each seed that both have."""
    own, dense = losses(name, steps, found), losses(BASELINE, steps, found)
    return [own[seed] / dense[seed] - 1 for seed in own if seed in dense]


def p_no_worse(values: Sequence[float], than: float = NO_WORSE_THAN) -> float:
    """Returns p of a paired one-sided t test against a gap of ``than`` or more; NaN for fewer than two seeds."""
    if len(values) < 2:
        return math.nan
    return float(scipy.stats.ttest_1samp(values, than, alternative="less").pvalue)


def dense_steps(loss: float, found: Results) -> float:
    """Returns the steps at which dense AdamW has a loss: between its lengths on straight lines in logs, beyond them too.

    Raises:
        ValueError: if dense has runs of fewer than two lengths.
    """
    curve = [
        (n, statistics.fmean(dense.values()))
        for n in sorted(found.task.lengths)
        if (dense := losses(BASELINE, n, found))
    ]
    if len(curve) < 2:
        raise ValueError(f"dense steps need dense runs of two lengths, got {len(curve)}")
    falling = [-value for _, value in curve]
    place = min(max(bisect.bisect(falling, -loss), 1), len(curve) - 1)
    (first, above), (last, below) = curve[place - 1 : place + 1]
    share = (above - loss) / (above - below)
    return float(np.exp(np.log(first) + share * np.log(last / first)))


def dense_equivalent(name: str, steps: int, found: Results) -> float | None:
    """Returns the steps at which dense AdamW has this loss, over those of the run; ``None`` while runs are missing."""
    own = losses(name, steps, found)
    if not own or sum(bool(losses(BASELINE, n, found)) for n in found.task.lengths) < 2:
        return None
    return dense_steps(statistics.fmean(own.values()), found) / steps


def table(found: Results, sizes: Mapping[str, Mapping[str, float]], bfloat16: Mapping[str, float]) -> str:
    """Returns a row for each method that is tuned, those that send most first."""
    header = ["method", "fewer bytes", "payload", "rate"]
    for steps in sorted(found.task.lengths):
        header += [f"{steps:,} steps"]
    header += ["p", "dense steps", "seeds"]
    lines = []
    for name in sorted(sizes, key=lambda n: -sizes[n]["sent"]):
        rate = best_rate(name, ROWS[name], found)
        if rate is None:
            continue
        cells: list[Any] = [name, *(f"{_markdown.figure(bfloat16[k] / sizes[name][k])}x" for k in ("sent", "payload"))]
        cells.append(f"{rate:g}")
        cells += [_gap(name, steps, found) for steps in sorted(found.task.lengths)]
        longest = found.task.lengths[0]
        values, share = gaps(name, longest, found), dense_equivalent(name, longest, found)
        p = p_no_worse(values)
        seeds = [count for n in found.task.lengths if (count := len(losses(name, n, found)))]
        cells += [
            "-" if math.isnan(p) else f"{p:.2g}",
            "-" if share is None else f"{share:.2f}",
            " to ".join(map(str, dict.fromkeys((min(seeds), max(seeds))))),
        ]
        lines.append(cells)
    return "\n".join(_markdown.table(header, lines, align="lr"))


def tuning(found: Results) -> str:
    """Returns what each row gave at each rate, on the validation part."""
    lines = []
    for name, row in ROWS.items():
        if tried := found.tried(name, row):
            lines.append((name, ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in tried.items())))
    return "\n".join(_markdown.table(("method", "rate: bits per character of the validation part"), lines, align="l"))


def measured(found: Results) -> str:
    """Returns a sentence on the runs: their time, machines and versions."""
    hours = sum(float(result["seconds"]) for result in found.runs.values()) / 3600
    processors = sorted({result["processor"] for result in found.runs.values()})
    of = sorted({", ".join(f"{name} {v}" for name, v in result["versions"].items()) for result in found.runs.values()})
    how = f"{len(found.runs)} runs, {hours:.1f} CPU hours on {', '.join(processors)}"
    return f"Measured: {how}; {'; '.join(of)}. Bytes: compiled."


def _gap(name: str, steps: int, found: Results) -> str:
    if name == BASELINE:
        values = list(losses(name, steps, found).values())
        return "-" if not values else with_spread(values, "{:.3f}")
    values = [100 * gap for gap in gaps(name, steps, found)]
    return "-" if not values else with_spread(values, "{:+.2f}") + "%"


def with_spread(values: Sequence[float], form: str) -> str:
    """Returns the mean of some values, and their standard deviation where there are several."""
    text = form.format(statistics.fmean(values))
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):.2f}"
