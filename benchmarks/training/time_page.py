"""The page of seconds to a loss: the tables, and what its figures say to three papers that are against compression."""

import math
import pathlib

from benchmarks.sweep.links import rate_name
from benchmarks.tasks.tasks import task
from benchmarks.training import time_plot
from benchmarks.training.curves import Curves
from benchmarks.training.seconds import BUCKETS, OPTIMIZERS
from benchmarks.training.time_to_loss import Composed, needed, steps_table, table, weak_wins, wins
from gradcomp_jax import _markdown
from gradcomp_jax.planning.predict import CLEAR


def write(found: Composed, page: pathlib.Path, command: str, measured: str) -> None:
    """Writes the page and its two pictures.

    Args:
        found: what it is of.
        page: where.
        command: that wrote it.
        measured: where the worker's seconds come from, as a sentence.
    """
    map_of, curves_of = page.with_name(f"{page.stem}-map.png"), page.with_suffix(".png")
    map_of.write_bytes(time_plot.ratios(found))
    curves_of.write_bytes(time_plot.curves(found))
    page.write_text("\n".join(text(found, command, measured, map_of.name, curves_of.name)) + "\n", encoding="utf-8")


def text(found: Composed, command: str, measured: str, map_of: str, curves_of: str) -> list[str]:
    """Returns the lines of the page."""
    dense, worker = found.dense, found.worker
    end = f"{dense.mean[-1]:.4g} {dense.metric}"
    return [
        f"# Time to accuracy: {dense.task}, {100 * found.tolerance:g}% from dense",
        "",
        f"```\n{command}\n```",
        "",
        "**Composed:** the steps that training took, times the seconds that a step would take."
        f" Task: {task(dense.task).summary}, {dense.workers} workers. {dense.name} ends at {end};"
        f" the target is {found.target:.4g}, {100 * found.tolerance:g}% from it.",
        "",
        "- **Steps** are measured: mean curves over the seeds, straight lines between epochs. Workers are simulated, which"
        " changes nothing of them.",
        f"- **Seconds of a step** are modelled. Computation: {_computation(found)}; arithmetic of the methods:"
        f" copies of the gradient at {worker.copy_rate / 1e9:.3g} GB/s. {measured} Communication: the bytes of the run's"
        " compiled program, by the planner's formulas, at the full rate of the link and"
        f" {1e3 * found.latency:g} ms of latency. The steps that [slow links](../network.md) measured are of other models.",
        f"- **The baseline** is the best dense one there is: {dense.name}'s curve, with the fastest step of bfloat16 and"
        f" float32, in one exchange or in {min(BUCKETS)} to {max(BUCKETS)} buckets beside two thirds of the"
        " computation. Averages that may arrive late have all computation beside them. Nothing of the other methods is"
        " hidden.",
        "",
        "## Seconds to the target",
        "",
        f"In brackets: over those of {dense.name}. Bold: slower than it. *Not reached*: the runs end before, so it"
        " takes more than they would.",
        "",
        *table(found),
        "",
        f"![Seconds to the target over those of the best dense baseline, by method and link]({map_of})",
        "",
        f"![{dense.metric} against seconds, a panel for each link]({curves_of})",
        "",
        "## Seconds of a step",
        "",
        *steps_table(found),
        "",
        "## What is held against compression",
        "",
        *(line for paragraph in answers(found) for line in (paragraph, "")),
        "What all of this does not know: stragglers, other traffic, links that give less than their rate, and faster"
        " devices. These make the exchange a larger part of a step: `--step` takes their seconds.",
    ]


def _computation(found: Composed) -> str:
    own = found.worker.own
    others = [
        f"{1e3 * own[name]:.3g} ms of {name}" if name in own else f"the optimizer of {name} is not counted"
        for name in sorted({one.method for one in found.compressed} & OPTIMIZERS.keys())
    ]
    return ", ".join([f"{1e3 * found.worker.compute:.3g} ms", *others])


def answers(found: Composed) -> list[str]:
    """Returns a paragraph on each of three papers, whose figures are those of the tables."""
    fast, slow, rates = max(found.rates), min(found.rates), found.rates
    methods = len(found.compressed)
    cells, plain = methods * len(rates), found.dense.name
    counted = f"{methods} method{'' if methods == 1 else 's'}"
    by_rate = ", ".join(f"{wins(found, [rate])} at {rate_name(rate)}" for rate in rates)
    best = {rate: min(found.compressed, key=lambda one: found.ratio(one, rate)) for rate in (fast, slow)}
    needs = ", ".join(f"{_times(needed(found, rate))} at {rate_name(rate)}" for rate in rates)
    never = sum(math.isinf(found.steps(one)) for one in found.compressed)
    return [
        "**Agarwal et al., 2021 ([2103.00543](https://arxiv.org/abs/2103.00543)): of more than 200 set-ups in a data"
        f" centre, 6 gain.** Here {wins(found, rates)} of {cells} cells of method and link ({methods} x"
        f" {len(rates)}) are more than {100 * (CLEAR - 1):.0f}% faster to the target than {plain}: {by_rate}."
        f" {_best(found, best[fast], fast)} {_best(found, best[slow], slow)}",
        "**Han et al., 2024 ([2407.01378](https://arxiv.org/abs/2407.01378)): baselines in 32 bits, and no metric from"
        " end to end.** By seconds of a step against dense float32 of which nothing is hidden,"
        f" {weak_wins(found, rates)} of {cells} cells would win. By seconds to the target against the best {plain},"
        f" {wins(found, rates)} do. Of {counted}, {never} never came to the target in their runs, however"
        " fast their steps are.",
        "**Zhang et al., 2020 ([2006.10103](https://arxiv.org/abs/2006.10103)): at 10 Gbit/s that are used in full, 2 to"
        " 5 times fewer bytes suffice for almost linear scaling.** For an exchange that takes a twentieth of the"
        " computation while nothing hides it, the model here needs so many times fewer bytes than float32's:"
        f" {needs}. That links are used in full is an assumption here.",
    ]


def _times(value: float) -> str:
    return "none" if value <= 1 else f"{_markdown.figure(value)}x"


def _best(found: Composed, one: Curves, rate: float) -> str:
    ratio = found.ratio(one, rate)
    if math.isinf(ratio):
        return f"At {rate_name(rate)} none comes to the target."
    fewer = _markdown.figure(found.dense.sent / one.sent)
    return f"The best at {rate_name(rate)} is {one.name} with {ratio:.2f}x the seconds and {fewer}x fewer bytes."
