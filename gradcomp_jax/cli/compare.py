"""``gradcomp compare``: several methods with equal hyper-parameters."""

from typing import Annotated

import typer
from rich.console import Console

from gradcomp_jax._errors import SettingError, look_up
from gradcomp_jax._process import leaving, raise_if_stopped
from gradcomp_jax.cli import ranges, runs
from gradcomp_jax.cli.options import TASK, Training, with_training_options
from gradcomp_jax.cli.progress import Each, progress
from gradcomp_jax.cli.user_errors import user_errors
from gradcomp_jax.experiments import Listeners, compare
from gradcomp_jax.experiments import task as task_of
from gradcomp_jax.experiments.recipes import GROUPS, RECIPES

_USUAL = task_of(TASK)


@with_training_options
def compare_command(
    training: Training,
    context: typer.Context,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Names with commas between (gradcomp methods lists them); also 'all' and 'replicas'.",
            show_default=f"the task's own; {','.join(_USUAL.methods)} of {TASK}",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        ranges.number(
            ranges.SEEDS,
            "Runs of each method: seeds 0, 1, 2, ...",
            show_default=f"the task's own; {_USUAL.seeds} of {TASK}; 1 for a --from function without a seed",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two seeds, a few epochs: a trial, not a result.")] = False,
) -> None:
    """Train several methods with equal hyper-parameters, and compare accuracy and bytes.

    Every method sees the same examples in the same order from the same initial parameters.
    The bytes are read from the compiled programs.
    """
    console = Console()
    with user_errors():
        usual = _USUAL if training.source is not None else task_of(training.task or TASK)
        names = list(usual.methods) if methods is None else _method_names(methods)
        problem, settings = runs.prepare(training, runs.workers(training), quick=quick)
        if seeds is None:
            seeds = usual.seeds if problem.has_seeds else 1
        if quick:
            seeds = min(seeds, 2)
        runs.make_folder(training.out)
        advice = runs.advice(training.checkpoint)
        with (
            runs.logged(training.log_dir) as log,
            progress(seeds * len(names), advice) as shown,
            leaving(shown.stopped),
        ):
            result = compare(
                problem,
                names,
                seeds=range(seeds),
                settings=settings,
                listener=Listeners(log, shown, Each(raise_if_stopped)),
                checkpoint=training.checkpoint,
                one_device=training.one_device,
            )
        runs.finish(console, result, training, "compare", context.obj or "gradcomp compare")


def _method_names(text: str) -> list[str]:
    """Returns the names that ``text`` stands for, each of them known and there once."""
    groups = {name: (name,) for name in RECIPES} | GROUPS
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise SettingError(f"methods must not be empty: name some of {runs.METHODS}")
    names = [name for word in words for name in look_up("method", word, groups)]
    return list(dict.fromkeys(names))
