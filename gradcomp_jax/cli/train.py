"""``gradcomp train``: one method, once."""

import contextlib
import os
import pathlib
import sys
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

from gradcomp_jax._errors import ExperimentError, SettingError, known_name
from gradcomp_jax._process import leaving, raise_if_stopped
from gradcomp_jax.cli import options, ranges, runs
from gradcomp_jax.cli.options import Training, with_training_options
from gradcomp_jax.cli.progress import Each, progress
from gradcomp_jax.cli.user_errors import mistakes, user_errors
from gradcomp_jax.distributed import Watchdog, check_equal, find_place, join
from gradcomp_jax.experiments import (
    Listener,
    Listeners,
    Trainer,
    count_baselines,
    summarize,
    train_with_checkpoints,
)
from gradcomp_jax.experiments.recipes import RECIPES
from gradcomp_jax.experiments.run_folder import check_free


@with_training_options
def train_command(
    training: Training,
    context: typer.Context,
    method: Annotated[str, typer.Option(help="Its name: gradcomp methods lists them.")] = "dgc",
    seed: Annotated[int, ranges.number(ranges.SEED, "Of the parameters and of the order.")] = 0,
    share_folder: Annotated[
        bool,
        typer.Option(
            "--share-folder", help="Save also in a --checkpoint folder that holds other files; they stay as they are."
        ),
    ] = False,
    distributed: options.Distributed = False,
    coordinator: options.Coordinator = None,
    process_id: options.Process = None,
    processes: options.Processes = None,
    heartbeat_timeout: options.Heartbeat = 100,
    step_timeout: options.StepTimeout = 300,
    verify_every: options.VerifyEvery = 0,
) -> None:
    """Train one method once, with checkpoints if wanted, in one process or as one of several."""
    console = Console()
    with user_errors():
        method = known_name("method", method, RECIPES)
        if share_folder and training.checkpoint is None:
            raise SettingError("--share-folder needs --checkpoint")
        if distributed:
            place = find_place(coordinator, process_id, processes)
            join(place, heartbeat_timeout=heartbeat_timeout)
            if jax.process_index() != 0:
                # What libraries print goes to stderr: the first process prints the results.
                sys.stdout.flush()
                os.dup2(2, 1)
            told = {"--method": method, "--seed": seed, "--verify-every": verify_every, **training.must_be_equal()}
            check_equal(told, remedy="start all of them with the same command line")
        elif not (coordinator is None and process_id is None and processes is None):
            raise SettingError("--coordinator, --process-id and --processes need --distributed")
        workers = jax.device_count() if distributed and training.workers is None else runs.workers(training)
        problem, settings = runs.prepare(training, workers, several_processes=distributed)
        if training.checkpoint is not None and not distributed:
            # Before anything is compiled; of several processes the first looks, when all can hear of it.
            check_free(training.checkpoint, share=share_folder)
        # The results are the same in every process: one of them says what they are.
        first = not distributed or jax.process_index() == 0
        if first:
            runs.make_folder(training.out)
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(runs.logged(training.log_dir))
            if distributed:
                passes = (ExperimentError, typer.Exit)
                watchdog = Watchdog(step_timeout=step_timeout, remedy=_restart(training.checkpoint), passes=passes)
                stack.enter_context(watchdog)
                # Losing the others may look like an error of the user, such as a folder that cannot be saved in.
                stack.enter_context(mistakes(watchdog.say))
            listener: Listener = log
            if first:
                shown = stack.enter_context(progress(1, runs.advice(training.checkpoint)))
                listener = Listeners(log, shown)
            if distributed:
                listener = Listeners(Each(watchdog.beat, at_end=True), listener)
                # The watchdog says that this process is gone, and the others must not wait for it.
                stack.enter_context(leaving(str, grace_s=0.0))
            else:
                stack.enter_context(leaving(shown.stopped))
                listener = Listeners(listener, Each(raise_if_stopped))
            one: dict[str, Any] = {"one_device": training.one_device}
            trainer = Trainer(method, problem, settings, listener=listener, verify_every=verify_every, **one)
            baselines = count_baselines(problem, settings, known=[trainer], listener=listener, **one)
            how: dict[str, Any] = {"share_folder": share_folder, "listener": listener}
            run = train_with_checkpoints(trainer, seed, training.checkpoint, **how)
        if first:
            result = summarize([run], baselines, **one)
            runs.finish(console, result, training, f"train-{method}", context.obj or "gradcomp train")


def _restart(checkpoint: pathlib.Path | None) -> str:
    """Says what to do when one process of several is lost."""
    if checkpoint is None:
        return "start all processes again (with --checkpoint FOLDER a run goes on from the last epoch saved)"
    return f"start all processes again with --checkpoint {checkpoint}, to go on from the last epoch saved"
