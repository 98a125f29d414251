"""The commands: what they take, and what they leave behind."""

import contextlib
import dataclasses
import pathlib
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

from gradcomp_jax.cli import cluster, devices, report
from gradcomp_jax.cli.guard import Guard
from gradcomp_jax.cli.mistakes import user_errors
from gradcomp_jax.cli.options import (
    BatchOption,
    CoordinatorOption,
    DataDirOption,
    DatasetOption,
    DelayOption,
    DensityOption,
    DistributedOption,
    EpochsOption,
    EveryOption,
    HeartbeatOption,
    MarkdownOption,
    MomentumOption,
    OutOption,
    ProcessesOption,
    ProcessOption,
    RateOption,
    RealOption,
    StepTimeoutOption,
    WorkersOption,
)
from gradcomp_jax.cli.plan import plan_command
from gradcomp_jax.cli.progress import Bar
from gradcomp_jax.experiments import (
    Comparison,
    Dataset,
    Listener,
    RunResult,
    SettingError,
    Settings,
    Task,
    Trainer,
    compare,
    count_baselines,
    data_mesh,
    load,
    summarize,
    task,
    train_with_checkpoints,
)
from gradcomp_jax.experiments.errors import look_up
from gradcomp_jax.experiments.machine import versions
from gradcomp_jax.experiments.recipes import ABLATIONS, ALL, DEFAULT, RECIPES, REPLICAS, ROUTES
from gradcomp_jax.experiments.settings import split_batch
from gradcomp_jax.methods import markdown_table

_METHODS = ", ".join(RECIPES)
_OUT = pathlib.Path("gradcomp-results")
_WORKERS = 8

app = typer.Typer(
    help="Gradient compression for JAX: train with it, and see what it saves.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradcomp {versions()['gradcomp-jax']}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    del version


@app.command("compare")
def compare_command(
    context: typer.Context,
    dataset: DatasetOption = "digits",
    methods: Annotated[
        str,
        typer.Option(help=f"Names with commas between: {_METHODS}; also 'all', 'ablations', 'routes' and 'replicas'."),
    ] = ",".join(DEFAULT),
    seeds: Annotated[int, typer.Option(help="Runs of each method: seeds 0, 1, 2, ...")] = 5,
    workers: WorkersOption = _WORKERS,
    epochs: EpochsOption = None,
    batch: BatchOption = None,
    learning_rate: RateOption = None,
    momentum: MomentumOption = None,
    density: DensityOption = None,
    delay: DelayOption = None,
    every: EveryOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two seeds, a few epochs: a trial, not a result.")] = False,
    data_dir: DataDirOption = None,
    real_devices: RealOption = False,
    out: OutOption = _OUT,
    markdown: MarkdownOption = None,
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
        settings = _settings(the_task, workers, epochs, batch, learning_rate, momentum, density, delay, every)
        if not real_devices:
            devices.simulate(workers)
        data = _load(dataset, data_dir, settings)
        _make_folder(out)
        with Bar(Console(stderr=True), runs=seeds * len(names)) as bar:
            result = compare(the_task, data, names, seeds=range(seeds), settings=settings, listener=bar)
        command = context.obj or "gradcomp compare"
        written = _write(result, out, f"compare-{dataset}", command, markdown)
    _show(console, result, written)


@app.command("train")
def train_command(
    context: typer.Context,
    method: Annotated[str, typer.Option(help=f"One of: {_METHODS}.")] = "dgc",
    dataset: DatasetOption = "digits",
    seed: Annotated[int, typer.Option(help="Of the parameters and of the order.")] = 0,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Devices that share every batch: 8, or with --distributed all there are.", show_default=False
        ),
    ] = None,
    epochs: EpochsOption = None,
    batch: BatchOption = None,
    learning_rate: RateOption = None,
    momentum: MomentumOption = None,
    density: DensityOption = None,
    delay: DelayOption = None,
    every: EveryOption = None,
    checkpoint: Annotated[
        pathlib.Path | None,
        typer.Option(help="Save every epoch in this folder, and go on from what is there."),
    ] = None,
    data_dir: DataDirOption = None,
    real_devices: RealOption = False,
    distributed: DistributedOption = False,
    coordinator: CoordinatorOption = None,
    process_id: ProcessOption = None,
    processes: ProcessesOption = None,
    heartbeat_timeout: HeartbeatOption = 60,
    step_timeout: StepTimeoutOption = 300,
    out: OutOption = _OUT,
    markdown: MarkdownOption = None,
) -> None:
    """Train one method once, with checkpoints if wanted, in one process or as one of several."""
    console = Console()
    with user_errors():
        the_task = task(dataset)
        look_up("method", method, RECIPES)
        if distributed:
            place = cluster.find_place(coordinator, process_id, processes)
            cluster.join(place, heartbeat_timeout=heartbeat_timeout)
        elif not (coordinator is None and process_id is None and processes is None):
            raise SettingError("--coordinator, --process-id and --processes need --distributed")
        if workers is None:
            workers = jax.device_count() if distributed else _WORKERS
        settings = _settings(the_task, workers, epochs, batch, learning_rate, momentum, density, delay, every)
        if not (real_devices or distributed):
            devices.simulate(workers)
        data = _load(dataset, data_dir, settings)
        # The results are the same in every process: one of them says what they are.
        first = not distributed or jax.process_index() == 0
        if first:
            _make_folder(out)
        with contextlib.ExitStack() as stack:
            listener: Listener = stack.enter_context(Bar(Console(stderr=True), runs=1)) if first else Listener()
            if distributed:
                remedy = _restart(checkpoint)
                listener = stack.enter_context(Guard(listener, step_timeout=step_timeout, remedy=remedy))
            trainer = Trainer(method, the_task, data, settings, listener=listener)
            baselines = count_baselines(the_task, data, settings, known=[trainer], listener=listener)
            run = _train(trainer, seed, checkpoint, listener)
        if not first:
            return
        result = summarize([run], baselines)
        command = context.obj or "gradcomp train"
        written = _write(result, out, f"train-{method}-{dataset}", command, markdown)
    _show(console, result, written)


def _train(trainer: Trainer, seed: int, checkpoint: pathlib.Path | None, listener: Listener) -> RunResult:
    if checkpoint is None:
        return trainer.run(seed, listener=listener)
    return train_with_checkpoints(trainer, seed, checkpoint, listener=listener)


def _restart(checkpoint: pathlib.Path | None) -> str:
    """What to do when one process of several is lost."""
    if checkpoint is None:
        return "start all processes again (with --checkpoint FOLDER a run goes on from the last epoch saved)"
    return f"start all processes again with --checkpoint {checkpoint}, to go on from the last epoch saved"


@app.command("methods")
def methods_command(
    workers: Annotated[int, typer.Option(help="Workers that the bits are counted for.")] = 8,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown, as it stands in the README.")
    ] = False,
) -> None:
    """List every method: what it sends and keeps, read from its program for one large matrix."""
    with user_errors():
        if workers < 2:
            raise SettingError(f"workers must be at least 2, got {workers}: one worker sends nothing")
        if as_markdown:
            typer.echo(markdown_table(workers=workers), nl=False)
        else:
            Console().print(report.method_table(workers))


app.command("plan")(plan_command)


def _method_names(text: str) -> list[str]:
    """Returns the names that ``text`` stands for, each of them known and there once."""
    groups = {name: (name,) for name in RECIPES} | {
        "all": ALL,
        "ablations": ABLATIONS,
        "routes": ROUTES,
        "replicas": REPLICAS,
    }
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise SettingError(f"methods must not be empty: name some of {_METHODS}")
    names = [name for word in words for name in look_up("method", word, groups)]
    return list(dict.fromkeys(names))


def _settings(
    the_task: Task,
    workers: int,
    epochs: int | None,
    batch: int | None,
    learning_rate: float | None,
    momentum: float | None,
    density: float | None,
    delay: int | None,
    every: int | None,
) -> Settings:
    """Returns the task's settings with what the user has said in their place."""
    # The batch stays what it is when the workers change, and with it the training problem.
    shared = split_batch(the_task.settings.batch if batch is None else batch, workers)
    said: dict[str, Any] = {
        "epochs": epochs,
        "learning_rate": learning_rate,
        "momentum": momentum,
        "density": density,
        "delay": delay,
        "every": every,
    }
    given = {name: value for name, value in said.items() if value is not None}
    return dataclasses.replace(the_task.settings, workers=workers, batch_per_worker=shared, **given)


def _load(dataset: str, data_dir: pathlib.Path | None, settings: Settings) -> Dataset:
    """Reads the data, and makes sure before anything is drawn that a run can start."""
    data_mesh(settings.workers, settings.axis_name)
    data = load(dataset, data_dir=data_dir)
    settings.steps_per_epoch(len(data.train_x))
    return data


def _make_folder(folder: pathlib.Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"cannot write to {folder}: {error}") from error


def _write(
    result: Comparison, out: pathlib.Path, stem: str, command: str, markdown: pathlib.Path | None
) -> list[pathlib.Path]:
    """Writes the picture, the JSON and, if wanted, the Markdown; returns their paths."""
    # Half a second, which only a command that draws should take.
    from gradcomp_jax.cli.plot import save_plot

    picture, figures = out / f"{stem}.png", out / f"{stem}.json"
    try:
        figures.write_text(result.to_json(command=command))
        save_plot(result, picture)
        if markdown is None:
            return [picture, figures]
        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(report.markdown(result, command=command))
    except OSError as error:
        raise SettingError(f"cannot write the results: {error}") from error
    return [picture, figures, markdown]


def _show(console: Console, result: Comparison, written: list[pathlib.Path]) -> None:
    console.print(report.title(result), style="bold", highlight=False)
    console.print()
    console.print(report.table(result))
    console.print()
    for note in report.notes(result):
        console.print(note, style="dim", highlight=False)
    for path in written:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
