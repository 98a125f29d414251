"""Tables and pictures of what runs gave."""

import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks import pareto
from benchmarks.pareto import Point
from benchmarks.tasks.tasks import task
from benchmarks.training.cells import BASELINES, Cell, Row, Study, baselines, metric_of, penalty
from benchmarks.training.curves import beside
from gradcomp_jax import _markdown
from gradcomp_jax.cli.colours import COLOURS

Found = Mapping[str, Mapping[str, Any]]


def runs(study: Study, found: Found, row: Row, workers: int) -> list[Mapping[str, Any]]:
    """Returns the results of a row, one for each seed that there is one of."""
    rate = study.rate(row, found)
    if rate is None:
        return []
    names = [Cell(study.task, row, workers, seed, rate).name for seed in range(study.seeds)]
    return [found[name] for name in names if name in found]


def table(study: Study, found: Found, *, missing: bool = True) -> str:
    """Returns a row for each method and number of workers, what sends most first; ``missing`` adds those without a run."""

    def sent(row: Row) -> float:
        own = runs(study, found, row, workers)
        return own[0]["wire"]["sent_mean"] if own else 0.0

    lines = []
    for workers, rows in sorted(study.rows.items(), reverse=True):
        for row in sorted(rows, key=sent, reverse=True):
            if missing or runs(study, found, row, workers):
                lines.append(_row(study, found, row, workers))
    heads = (
        "method",
        "workers",
        "every",
        _metric(found),
        "against dense",
        "bytes/step",
        "fewer bytes",
        "rate",
        "seeds",
    )
    return "\n".join(_markdown.table(heads, lines, align="lr"))


def not_run(study: Study, found: Found) -> str:
    """Returns a sentence on the methods without a run, by their numbers of workers; empty where each has one."""
    left: dict[str, list[int]] = {}
    for workers, rows in study.rows.items():
        for row in rows:
            if not runs(study, found, row, workers):
                left.setdefault(str(row), []).append(workers)
    same: dict[str, list[str]] = {}
    for name, numbers in left.items():
        same.setdefault(", ".join(map(str, sorted(numbers))), []).append(name)
    of = "; ".join(f"{', '.join(names)} with {numbers} workers" for numbers, names in same.items())
    return f"Not run so far: {of}." if of else ""


def at_other_rates(study: Study, found: Found) -> str:
    """Returns a sentence on the seeds at rates that are not the table's, such as a narrower grid's; empty without any."""
    said = []
    for workers, rows in study.rows.items():
        for row in rows:
            chosen, by_rate = study.rate(row, found), dict[float, list[float]]()
            for name, result in found.items():
                a_seed = name.startswith(f"{row}-workers-{workers}-rate-") and not result["tuning"]
                if a_seed and (rate := result["learning_rate"]) != chosen:
                    by_rate.setdefault(rate, []).append(metric_of(result))
            for rate, values in by_rate.items():
                seeds = "1 seed" if len(values) == 1 else f"{len(values)} seeds"
                said.append(f"{row} with {workers} workers {spread(values, _metric(found))} at {rate:g} ({seeds})")
    return f"Run as well, at rates that tuning did not choose from this grid: {'; '.join(said)}." if said else ""


def _metric(found: Found) -> str:
    return next(iter(found.values()))["metric"] if found else "metric"


def _baseline(study: Study, found: Found, row: Row, workers: int) -> list[Mapping[str, Any]]:
    """Returns the results of what a row is held against."""
    for name in baselines(row.method):
        base = Row(name, optimizer=row.optimizer, epochs=row.epochs)
        if base.tuned in study.tuned and (own := runs(study, found, base, workers)):
            return own
    return []


def _row(study: Study, found: Found, row: Row, workers: int) -> tuple[str, ...]:
    own = runs(study, found, row, workers)
    every, rate = "1" if row.every is None else str(row.every), study.rate(row, found)
    if not own:
        return (row.name, str(workers), every, "not run", "-", "-", "-", "-" if rate is None else f"{rate:g}", "0")
    values = [metric_of(r) for r in own]
    sent = own[0]["wire"]["sent_mean"]
    against = fewer = "-"
    if base := _baseline(study, found, row, workers):
        first = statistics.fmean(map(metric_of, base))
        mean = statistics.fmean(values)
        percent = own[0]["metric"] != "accuracy"
        against = f"{100 * (mean / first - 1):+.1f}%" if percent else f"{100 * (mean - first):+.2f} points"
        fewer = f"{_markdown.figure(base[0]['wire']['sent_mean'] / sent)}x"
    judged = spread(values, own[0]["metric"])
    return (row.name, str(workers), every, judged, against, f"{sent:,.0f}", fewer, f"{rate:g}", str(len(own)))


def spread(values: list[float], metric: str) -> str:
    """Returns mean and standard deviation; of accuracies in percent."""
    scale, digits = (100, 2) if metric == "accuracy" else (1, 3)
    text = f"{scale * statistics.fmean(values):.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {scale * statistics.stdev(values):.{digits}f}"


def tuning(study: Study, found: Found) -> str:
    """Returns what each method gave at each rate of the grid, on the validation part."""
    lines = []
    for name in study.tuned:
        cells, values = study.tuning(name), []
        for cell in cells:
            result = found.get(cell.name)
            values.append("not run" if result is None else _judged(result["evaluation"][-1]))
        if set(values) == {"not run"}:
            continue
        lines.append((name, f"{cells[study.grid.index(1.0)].learning_rate:g}", *values))
    heads = ("method", "rate", *(f"{fraction:g} of it" for fraction in study.grid))
    return "\n".join(_markdown.table(heads, lines, align="lr"))


def finals(study: Study, found: Found) -> str:
    """Returns a sentence on what first seeds gave on the validation part at the rates that went on; empty without any."""
    said = []
    for row in study.most[1]:
        cells = study.last(row, found)
        ran = {c.learning_rate: r["validation"] for c in cells if "validation" in (r := found.get(c.name, {}))}
        if len(cells) > 1 and ran:
            said.append(f"{row} {', '.join(f'{_judged(value)} at {rate:g}' for rate, value in ran.items())}")
    return f"After all epochs, of the rates that went on: {'; '.join(said)}." if said else ""


def edges(study: Study, found: Found) -> str:
    """Returns a sentence on the methods whose best rate is at an edge of what was tried; empty where there are none."""
    names = {}
    for row in study.most[1]:
        if (best := study.rate(row, found)) is None:
            continue
        start = study.tuning(row.tuned)[0].name.rpartition("-rate-")[0] + "-rate-"
        tried = [r for key, r in found.items() if key.startswith(start) and r["tuning"]]
        at = next(penalty(r) for r in tried if r["learning_rate"] == best)
        no_better = [r["learning_rate"] for r in tried if penalty(r) >= at]
        # A whole run says more than a short one.
        no_better += [cell.learning_rate for cell in study.last(row, found)]
        if not min(no_better) < best < max(no_better):
            names[row.tuned] = None
    return f"At the edge of the rates tried, so that a better one may lie outside: {', '.join(names)}." if names else ""


def outside(study: Study, found: Found) -> str:
    """Returns a sentence on the tuning runs at rates that the grid does not have; empty where there are none."""
    grid = {cell.name for name in study.tuned for cell in study.tuning(name)}
    tried: dict[str, list[str]] = {}
    for name, result in found.items():
        if name.endswith("-tuning") and name not in grid:
            rate = name.removesuffix("-tuning").rpartition("-rate-")[2]
            tried.setdefault(name.partition("-workers-")[0], []).append(
                f"{_judged(result['evaluation'][-1])} at {rate}"
            )
    of = "; ".join(f"{name} {', '.join(values)}" for name, values in tried.items())
    return f"Outside of this grid, and not used above: {of}." if of else ""


def _judged(last: float | None) -> str:
    return "diverged" if last is None else f"{last:.4g}"


def write(name: str, study: Study, found: Found, page: pathlib.Path) -> None:
    """Writes the page of a study, and its picture."""
    # A folder of runs is of the task: another study's are not counted here, those at rates that were given up are.
    own = tuple(f"{row}-workers-{workers}-rate-" for workers, rows in study.rows.items() for row in rows)
    found = {name: result for name, result in found.items() if name.startswith(own)}
    if not found:
        raise SystemExit(f"nothing was run: give --hours, or another --out ({page} is as it was)")
    the_task = task(study.task)
    settings = the_task.settings
    picture = page.with_suffix(".png")
    plot(study, found, picture)
    short = max(1, settings.epochs // study.short)
    epochs = "one epoch" if short == 1 else f"{short} epochs"
    falling = ", at a learning rate that falls linearly to zero" if settings.schedule == "linear" else ""
    said = f"{settings.epochs} epochs" + (", or as many as a name says" if any(r.epochs for r in study.most[1]) else "")
    chosen = "the best is the rate above"
    if study.close:
        chosen = (
            f"with each rate that was less than {100 * study.close:g}% worse than the best, the first seed is run for all"
            " epochs, and what is best then, by the validation part, is the rate above"
        )
    lines = [
        f"# {study.title or name}: {the_task.summary}",
        "",
        *((lead, "") if (lead := study.note or _lead(page)) else ()),
        f"```\npython benchmarks/accuracy.py {name} --hours HOURS --write {page}\n```",
        "",
        f"A batch of {settings.batch} for all workers together, {said}, {settings.optimizer}{falling}."
        " Measured: the metric on the test part after the last epoch, mean and standard deviation over the seeds; bytes that a"
        " device sends, read from the compiled program, averaged over the run.",
        "",
        table(study, found, missing=False),
        "",
        *((others, "") if (others := at_other_rates(study, found)) else ()),
        *((left, "") if (left := not_run(study, found)) else ()),
        f"![{name}]({picture.name})",
        "",
        *((f"In the papers: {study.papers}", "") if study.papers else ()),
        "## Tuning",
        "",
        f"One run of {epochs} for each method and rate, judged by the validation part; {chosen}. The test"
        " part is used for nothing else than the figures above.",
        "",
        tuning(study, found),
        "",
        *((whole, "") if (whole := finals(study, found)) else ()),
        *((edge, "") if (edge := edges(study, found)) else ()),
        *((tried, "") if (tried := outside(study, found)) else ()),
        "## Machines",
        "",
        *machines(found),
        "",
    ]
    page.write_text("\n".join(lines))


def _lead(page: pathlib.Path) -> str:
    """Returns what somebody wrote between the heading of a page and its command: what to take from it."""
    text = page.read_text() if page.exists() else ""
    return text.partition("\n")[2].partition("```")[0].strip()


def machines(found: Found) -> list[str]:
    """Returns a line for each machine that runs were on: which, for how long, and how it held the workers."""
    by_machine: dict[tuple[str, bool], dict[str, Mapping[str, Any]]] = {}
    for name, result in found.items():
        facts = "; ".join(", ".join(f"{k} {v}" for k, v in result[kind].items()) for kind in ("machine", "versions"))
        # Runs say so since there are others.
        shared = result.get("one_device", result["machine"]["platform"] != "cpu")
        by_machine.setdefault((facts, shared), {})[name] = result
    lines = []
    for (facts, shared), own in by_machine.items():
        hours = sum(len(r["loss_of_ten_steps"]) * 10 * r["step_s"] for r in own.values()) / 3600
        rows = dict.fromkeys(name.partition("-rate-")[0] for name in own)
        which = f" ({', '.join(rows)})" if len(by_machine) > 1 else ""
        how = (
            "all workers on one device, under `vmap`; bytes are those of the step of devices of their own, as lowered"
            if shared
            else "a simulated CPU device for each worker"
        )
        number = "1 run" if len(own) == 1 else f"{len(own)} runs"
        lines.append(f"- {number}{which}, about {hours:.1f} hours of steps: {how}. {facts}.")
    return lines


def at_the_end(study: Study, found: Found) -> dict[Row, dict[int, list[float]]]:
    """Returns the metric after the last epoch of every seed, by row and number of workers."""
    ends: dict[Row, dict[int, list[float]]] = {}
    for workers in sorted(study.rows):
        for row in study.rows[workers]:
            if own := runs(study, found, row, workers):
                ends.setdefault(row, {})[workers] = [metric_of(r) for r in own]
    return ends


def plot(study: Study, found: Found, path: pathlib.Path) -> None:
    """Draws the metric at the end against the bytes of a step, and against the workers where there are several numbers."""
    ends = at_the_end(study, found)
    lines = {row: by_workers for row, by_workers in ends.items() if len(by_workers) > 1}
    figure = Figure(figsize=(8.4 + 4 * bool(lines), 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    of_bytes, *of_workers = figure.subplots(1, 1 + bool(lines), squeeze=False, width_ratios=(2, 1)[: 1 + bool(lines)])[
        0
    ]
    # The first number has all the methods; until those are run, the one with the most of them and their baseline.
    workers = max(study.rows, key=lambda n: (n in ends.get(study.rows[n][0], ()), sum(n in by for by in ends.values())))
    metric = _metric(found)
    series: dict[int | None, list[Point]] = {}
    for row, by_workers in ends.items():
        if workers in by_workers:
            sent = runs(study, found, row, workers)[0]["wire"]["sent_mean"]
            series.setdefault(row.epochs, []).append(Point.of(str(row), sent, by_workers[workers]))
    pareto.draw(of_bytes, list(series.values()), more_is_better=metric == "accuracy", baselines=BASELINES)
    of_bytes.set(ylabel=metric, title=f"{workers} workers")
    for axes in of_workers:
        for number, (row, by_workers) in enumerate(lines.items()):
            means = [statistics.fmean(values) for values in by_workers.values()]
            bars = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in by_workers.values()]
            look = {
                "color": COLOURS[number % len(COLOURS)],
                "marker": "os^"[number // len(COLOURS) % 3],
                "markersize": 5,
            }
            axes.errorbar(beside(by_workers, number, len(lines)), means, bars, capsize=3, label=str(row), **look)
        axes.set(xscale="log", xlabel="workers", title="by workers")
        axes.set_xticks(sorted(study.rows), labels=list(map(str, sorted(study.rows))))
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    figure.suptitle(task(study.task).summary, fontsize=10)
    figure.savefig(path, dpi=110)
