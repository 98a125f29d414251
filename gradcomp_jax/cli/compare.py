"""``gradcomp compare``: several methods with equal hyper-parameters."""

from typing import Annotated

import typer
from rich.console import Console

from gradcomp_jax._errors import SettingError, look_up
from gradcomp_jax.cli import options, runs
from gradcomp_jax.cli.progress import Bar
from gradcomp_jax.cli.user_errors import user_errors
from gradcomp_jax.experiments import compare, task
from gradcomp_jax.experiments.recipes import ABLATIONS, ALL, COLLECTIVES, DEFAULT, RECIPES, REPLICAS


def compare_command(
    context: typer.Context,
    dataset: options.Dataset = "digits",
    methods: Annotated[
        str,
        typer.Option(
            help=f"Names with commas between: {runs.METHODS}; also 'all', 'ablations', 'collectives' and 'replicas'."
        ),
    ] = ",".join(DEFAULT),
    seeds: Annotated[int, typer.Option(help="Runs of each method: seeds 0, 1, 2, ...")] = 5,
    workers: options.Workers = runs.WORKERS,
    epochs: options.Epochs = None,
    batch: options.Batch = None,
    learning_rate: options.Rate = None,
    momentum: options.Momentum = None,
    density: options.Density = None,
    delay: options.Delay = None,
    every: options.Every = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two seeds, a few epochs: a trial, not a result.")] = False,
    data_dir: options.DataDir = None,
    real_devices: options.Real = False,
    out: options.Out = runs.OUT,
    markdown: options.Markdown = None,
) -> None:
    """Train several methods with equal hyper-parameters, and compare accuracy and bytes.

    Every method sees the same examples in the same order from the same initial parameters.
    The bytes are read from the compiled programs.
    """
    console = Console()
    with user_errors():
        names = _method_names(methods)
        if seeds < 1:
            raise SettingError(f"seeds must be at least 1, got {seeds}")
        the_task = task(dataset)
        if quick:
            seeds = min(seeds, 2)
            epochs = max(the_task.settings.epochs // 10, 1) if epochs is None else epochs
        settings = runs.make_settings(the_task, workers, batch, epochs, learning_rate, momentum, density, delay, every)
        if not real_devices:
            runs.simulate(workers)
        data = runs.load_data(dataset, data_dir, settings)
        runs.make_folder(out)
        with Bar(Console(stderr=True), runs=seeds * len(names)) as bar:
            result = compare(the_task, data, names, seeds=range(seeds), settings=settings, listener=bar)
        command = context.obj or "gradcomp compare"
        written = runs.write(result, out, f"compare-{dataset}", command, markdown)
    runs.show(console, result, written)


def _method_names(text: str) -> list[str]:
    """Returns the names that ``text`` stands for, each of them known and there once."""
    groups = {name: (name,) for name in RECIPES} | {
        "all": ALL,
        "ablations": ABLATIONS,
        "collectives": COLLECTIVES,
        "replicas": REPLICAS,
    }
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise SettingError(f"methods must not be empty: name some of {runs.METHODS}")
    names = [name for word in words for name in look_up("method", word, groups)]
    return list(dict.fromkeys(names))
