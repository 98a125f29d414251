"""The table of a comparison, for a terminal and as Markdown."""

from rich import box
from rich.table import Table

from gradcomp_jax import _markdown
from gradcomp_jax.experiments import Comparison, MethodResult
from gradcomp_jax.experiments.recipes import RECIPES
from gradcomp_jax.methods import registry

_NOTES = (
    "accuracy: on the test set after the last epoch, mean and standard deviation over {seeds}.",
    "bytes/step: what one device sends, indices, scales and dense leaves included, read from the "
    "compiled program at the final density; run mean: the same over the whole run, warm-up "
    "included.",
    "vs bf16, vs f32: how many times fewer bytes than the dense all-reduce, at the final density.",
    "step ms: median. {where}",
)
_ONE_PROCESS = (
    "The {workers} workers share one machine and its memory: this time says nothing about speed on a network."
)
_PROCESSES = "The {workers} workers are the devices of {processes} processes: the time has their network in it."
_COLUMNS = ("method", "accuracy %", "bytes/step", "run mean", "vs bf16", "vs f32", "step ms")


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
    seeds = f"{count} seed{'s' if count > 1 else ''}"
    processes = int(comparison.machine.get("processes", 1))
    where = (_PROCESSES if processes > 1 else _ONE_PROCESS).format(
        workers=comparison.settings.workers, processes=processes
    )
    return [note.format(seeds=seeds, where=where) for note in _NOTES]


def title(comparison: Comparison) -> str:
    """Returns one line that says what was compared."""
    settings = comparison.settings
    line = (
        f"{comparison.dataset}: {settings.workers} workers x {settings.batch_per_worker} examples, "
        f"{settings.epochs} epochs, SGD {settings.learning_rate:g}, "
        f"momentum {settings.momentum:g}, density {settings.density:g}"
    )
    periodic = {name for name, recipe in RECIPES.items() if recipe.periodic}
    if any(result.method in periodic for result in comparison.methods):
        line += f", delay {settings.delay}, an exchange every {settings.every} steps"
    return line


def table(comparison: Comparison) -> Table:
    """Returns the table for a terminal."""
    result = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for number, column in enumerate(_COLUMNS):
        result.add_column(column, justify="right" if number else "left", no_wrap=number == 0)
    for row in rows(comparison):
        result.add_row(*row)
    return result


def method_table(workers: int) -> Table:
    """Returns the table of all methods, for a terminal: bits for each value, bytes of state for each parameter."""
    result = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    # As many columns as 80 characters hold: the Markdown has collectives and papers too.
    for column in registry.header(workers)[:6]:
        number = column not in ("method", "biased", "momentum")
        result.add_column(column.replace(" / ", "\n/ "), justify="right" if number else "left", no_wrap=True)
    for row in registry.table(workers=workers):
        result.add_row(registry.command_name(row.name), *registry.cells(row)[1:6])
    return result


def markdown(comparison: Comparison, *, command: str) -> str:
    """Returns the table as a Markdown page, with the command and the machine it ran on."""
    lines = [
        f"# {title(comparison)}",
        "",
        f"```\n{command}\n```",
        "",
        *_markdown.table(_COLUMNS, rows(comparison), align="lr"),
        "",
        *(f"- {note}" for note in notes(comparison)),
        "",
        "Machine: " + ", ".join(f"{k} {v}" for k, v in comparison.machine.items()) + ".",
        "Versions: " + ", ".join(f"{k} {v}" for k, v in comparison.versions.items()) + ".",
        "",
    ]
    return "\n".join(lines)


def _row(result: MethodResult) -> tuple[str, ...]:
    accuracy = f"{100 * result.accuracy_mean:.2f}"
    if len(result.runs) > 1:
        accuracy += f" ± {100 * result.accuracy_std:.2f}"
    return (
        result.method,
        accuracy,
        f"{result.wire.sent:,}",
        f"{round(result.wire.sent_mean):,}",
        _ratio(result.ratio_bf16),
        _ratio(result.ratio_f32),
        f"{1e3 * result.step_time.median:.2f}",
    )


def _ratio(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.1f}x"
