"""``gradcomp train``: one method, once."""

import contextlib
import os
import pathlib
import sys
from typing import Annotated

import jax
import typer
from rich.console import Console

from gradcomp_jax._errors import ExperimentError, SettingError, known_name
from gradcomp_jax.cli import options, runs
from gradcomp_jax.cli.progress import Bar, Beating
from gradcomp_jax.cli.user_errors import user_errors
from gradcomp_jax.distributed import Watchdog, find_place, join
from gradcomp_jax.experiments import (
    Listener,
    RunResult,
    Trainer,
    count_baselines,
    summarize,
    task,
    train_with_checkpoints,
)
from gradcomp_jax.experiments.recipes import RECIPES


def train_command(
    context: typer.Context,
    method: Annotated[str, typer.Option(help=f"One of: {runs.METHODS}.")] = "dgc",
    dataset: options.Dataset = "digits",
    seed: Annotated[int, typer.Option(help="Of the parameters and of the order.")] = 0,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Devices that share every batch: 8, or with --distributed all there are.", show_default=False
        ),
    ] = None,
    epochs: options.Epochs = None,
    batch: options.Batch = None,
    learning_rate: options.Rate = None,
    momentum: options.Momentum = None,
    density: options.Density = None,
    delay: options.Delay = None,
    every: options.Every = None,
    checkpoint: Annotated[
        pathlib.Path | None, typer.Option(help="Save every epoch in this folder, and go on from what is there.")
    ] = None,
    data_dir: options.DataDir = None,
    real_devices: options.Real = False,
    distributed: options.Distributed = False,
    coordinator: options.Coordinator = None,
    process_id: options.Process = None,
    processes: options.Processes = None,
    heartbeat_timeout: options.Heartbeat = 100,
    step_timeout: options.StepTimeout = 300,
    out: options.Out = runs.OUT,
    markdown: options.Markdown = None,
) -> None:
    """Train one method once, with checkpoints if wanted, in one process or as one of several."""
    console = Console()
    with user_errors():
        the_task = task(dataset)
        method = known_name("method", method, RECIPES)
        if distributed:
            place = find_place(coordinator, process_id, processes)
            join(place, heartbeat_timeout=heartbeat_timeout)
            _print_results_once()
        elif not (coordinator is None and process_id is None and processes is None):
            raise SettingError("--coordinator, --process-id and --processes need --distributed")
        if workers is None:
            workers = jax.device_count() if distributed else runs.WORKERS
        settings = runs.make_settings(the_task, workers, batch, epochs, learning_rate, momentum, density, delay, every)
        if not (real_devices or distributed):
            runs.simulate(workers)
        data = runs.load_data(dataset, data_dir, settings)
        # The results are the same in every process: one of them says what they are.
        first = not distributed or jax.process_index() == 0
        if first:
            runs.make_folder(out)
        with contextlib.ExitStack() as stack:
            listener: Listener = stack.enter_context(Bar(Console(stderr=True), runs=1)) if first else Listener()
            if distributed:
                passes = (ExperimentError, typer.Exit)
                watchdog = Watchdog(step_timeout=step_timeout, remedy=_restart(checkpoint), passes=passes)
                listener = Beating(listener, stack.enter_context(watchdog))
            trainer = Trainer(method, the_task, data, settings, listener=listener)
            baselines = count_baselines(the_task, data, settings, known=[trainer], listener=listener)
            run = _train(trainer, seed, checkpoint, listener)
        if not first:
            return
        result = summarize([run], baselines)
        command = context.obj or "gradcomp train"
        written = runs.write(result, out, f"train-{method}-{dataset}", command, markdown)
    runs.show(console, result, written)


def _print_results_once() -> None:
    """Sends what libraries print in all processes but the first to stderr: the first prints the results."""
    if jax.process_index() != 0:
        sys.stdout.flush()
        os.dup2(2, 1)


def _train(trainer: Trainer, seed: int, checkpoint: pathlib.Path | None, listener: Listener) -> RunResult:
    if checkpoint is None:
        return trainer.run(seed, listener=listener)
    return train_with_checkpoints(trainer, seed, checkpoint, listener=listener)


def _restart(checkpoint: pathlib.Path | None) -> str:
    """What to do when one process of several is lost."""
    if checkpoint is None:
        return "start all processes again (with --checkpoint FOLDER a run goes on from the last epoch saved)"
    return f"start all processes again with --checkpoint {checkpoint}, to go on from the last epoch saved"
