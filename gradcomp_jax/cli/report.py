"""The table of a comparison, for a terminal and as Markdown."""

import math
from collections.abc import Iterator

from gradcomp_jax import _markdown
from gradcomp_jax.cli.tables import Columns
from gradcomp_jax.experiments import Comparison, MethodResult, Metric
from gradcomp_jax.experiments.recipes import RECIPES
from gradcomp_jax.experiments.tasks import TASKS

_METRICS: dict[Metric, tuple[str, str]] = {
    "accuracy": ("accuracy %", "accuracy: on the test set after the last epoch"),
    "evaluation loss": ("evaluation loss", "evaluation loss: on the evaluation batches after the last epoch"),
    "training loss": ("training loss", "training loss: mean over the steps of the last epoch"),
    "bits per character": ("bits/character", "bits/character: on the test text after the last epoch"),
    "perplexity": ("perplexity", "perplexity: on the test text after the last epoch"),
}
"""The column, and what is said of it."""
_NOTES = (
    "{metric}, {seeds}.",
    "bytes/step: what one device sends, indices, scales and dense leaves included, read from the "
    "{program} at the final density; run mean: the same over the whole run, warm-up "
    "included.",
    "vs bf16, vs f32: how many times fewer bytes than the dense all-reduce, at the final density.",
    "step ms: median. {where}",
)
_ONE_PROCESS = (
    "The {workers} workers share one machine and its memory: this time says nothing about speed on a network."
)
_PROCESSES = "The {workers} workers are the devices of {processes} processes: the time has their network in it."
_COLUMNS = ("bytes/step", "run mean", "vs bf16", "vs f32", "step ms")


def columns(comparison: Comparison) -> tuple[str, ...]:
    """Returns the names of the columns."""
    return ("method", _METRICS[comparison.metric][0], *_COLUMNS)


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Returns the cells of the table, one row for each method.

    A dense baseline that was compiled and not trained has a row with its bytes alone.
    """
    table = [_row(method) for method in comparison.methods]
    trained = {method.method for method in comparison.methods}
    sent_bf16 = comparison.baseline_bytes["dense-bf16"]
    sent_f32 = comparison.baseline_bytes["dense"]
    for name, sent in comparison.baseline_bytes.items():
        if name not in trained:
            over = max(sent, 1)
            ratios = (_ratio(sent_bf16 / over), _ratio(sent_f32 / over))
            table.append((name, "not trained", f"{sent:,}", f"{sent:,}", *ratios, "-"))
    return table


def notes(comparison: Comparison) -> list[str]:
    """Returns what a reader has to know about the columns."""
    count = len(comparison.seeds)
    seeds = f"mean and standard deviation over {count} seeds" if count > 1 else "of one seed"
    processes = int(comparison.machine.get("processes", 1))
    where = (_PROCESSES if processes > 1 else _ONE_PROCESS).format(
        workers=comparison.settings.workers, processes=processes
    )
    metric = _METRICS[comparison.metric][1]
    shared = comparison.machine.get("one_device")
    program = "program of a step on devices of their own, before it is compiled," if shared else "compiled program"
    of_task = [task.note for name, task in TASKS.items() if task.note and name == comparison.dataset]
    return [
        *(f"diverged: {one}; a smaller --learning-rate may help." for one in _diverged(comparison)),
        *(note.format(metric=metric, seeds=seeds, where=where, program=program) for note in _NOTES),
        *of_task,
    ]


def title(comparison: Comparison) -> str:
    """Returns one line that says what was compared."""
    settings = comparison.settings
    rate = f"{settings.learning_rate:g}{'' if settings.schedule == 'constant' else ' falling to 0'}"
    optimizer = f"AdamW {rate}" if settings.optimizer == "adamw" else f"SGD {rate}, momentum {settings.momentum:g}"
    examples = f"{settings.batch_per_worker} example{'s' if settings.batch_per_worker > 1 else ''}"
    line = (
        f"{comparison.dataset}: {settings.workers} workers x {examples}, "
        f"{settings.epochs} epochs, {optimizer}, density {settings.density:g}"
    )
    periodic = {name for name, recipe in RECIPES.items() if recipe.periodic}
    if any(result.method in periodic for result in comparison.methods):
        line += f", delay {settings.delay}, an exchange every {settings.every} steps"
    return line


def table(comparison: Comparison) -> Columns:
    """Returns the table for a terminal."""
    names = columns(comparison)
    cells = [dict(zip(names, row, strict=True)) for row in rows(comparison)]
    return Columns(cells, dropped_first=("run mean", "step ms", "vs f32", "vs bf16"))


def markdown(comparison: Comparison, *, command: str) -> str:
    """Returns the table as a Markdown page, with the command and the machine it ran on."""
    lines = [
        f"# {title(comparison)}",
        "",
        f"```\n{command}\n```",
        "",
        *_markdown.table(columns(comparison), rows(comparison), align="lr"),
        "",
        *(f"- {note}" for note in notes(comparison)),
        "",
        "Machine: " + ", ".join(f"{k} {v}" for k, v in comparison.machine.items()) + ".",
        "Versions: " + ", ".join(f"{k} {v}" for k, v in comparison.versions.items()) + ".",
        "",
    ]
    return "\n".join(lines)


def _diverged(comparison: Comparison) -> Iterator[str]:
    """Says of each method at which step of which seed its loss was finite no more."""
    for method in comparison.methods:
        lost = []
        for run in method.runs:
            first = next((step for step, loss in enumerate(run.loss, 1) if not math.isfinite(loss)), None)
            if first is not None:
                lost.append(f"at step {first} of seed {run.seed}")
            elif not all(map(math.isfinite, run.evaluation)):
                lost.append(f"in the evaluation of seed {run.seed}")
        if lost:
            yield f"{method.method} is not finite {', '.join(lost)}"


def _row(result: MethodResult) -> tuple[str, ...]:
    if not math.isfinite(result.evaluation_mean):
        judged, spread = "diverged", ""
    elif result.runs[0].metric == "accuracy":
        judged, spread = f"{100 * result.evaluation_mean:.2f}", f"{100 * result.evaluation_std:.2f}"
    else:
        judged, spread = f"{result.evaluation_mean:.4g}", f"{result.evaluation_std:.2g}"
    return (
        result.method,
        f"{judged} ± {spread}" if len(result.runs) > 1 and spread else judged,
        f"{result.wire.sent:,}",
        f"{round(result.wire.sent_mean):,}",
        _ratio(result.ratio_bf16),
        _ratio(result.ratio_f32),
        f"{1e3 * result.step_time.median:.2f}" if result.step_time.steps else "-",
    )


def _ratio(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.1f}x"
