"""What the commands that train have in common: the problem, settings, simulated devices, and what is left behind."""

import contextlib
import dataclasses
import os
import pathlib
import tempfile

import jax
from rich.console import Console

from gradcomp_jax._checks import Range
from gradcomp_jax._errors import SettingError
from gradcomp_jax.cli import report
from gradcomp_jax.cli.event_files import EventFiles
from gradcomp_jax.cli.options import TASK, WORKERS, Training
from gradcomp_jax.cli.own_code import imported
from gradcomp_jax.cli.tables import print_table, tell, write_result
from gradcomp_jax.experiments import Comparison, Listener, Problem, Settings, data_mesh, load, own_problem, task
from gradcomp_jax.experiments.recipes import RECIPES
from gradcomp_jax.experiments.settings import RANGES, split_batch

METHODS = ", ".join(RECIPES)
_FLAG = "--xla_force_host_platform_device_count"
_SIMULATED = Range(1, 1_024)
_SAID = ("epochs", "learning_rate", "momentum", "density", "delay", "every")


def workers(training: Training) -> int:
    """Returns the number of workers that one is told, or that of the task."""
    if training.workers is not None:
        return training.workers
    return WORKERS if training.source is not None else task(training.task or TASK).settings.workers


def prepare(
    training: Training, workers: int, *, several_processes: bool = False, quick: bool = False
) -> tuple[Problem, Settings]:
    """Returns what is trained and how, having made sure that a run can start before anything is drawn."""
    RANGES["workers"].check("workers", workers)
    if training.one_device and (training.real_devices or several_processes):
        other = "--real-devices" if training.real_devices else "--distributed"
        raise SettingError(f"--one-device puts all workers on one device, and {other} on several: drop one of them")
    simulated = not (training.real_devices or training.one_device or several_processes)
    if training.checkpoint is not None and not str(training.checkpoint).strip("."):
        raise SettingError("--checkpoint must name a folder of its own, not the current one")
    for option in ("checkpoint", "log_dir", "out", "data_dir"):
        folder = getattr(training, option)
        # Not folder.exists(), which raises for a name that is too long.
        if folder is not None and os.path.exists(folder) and not os.path.isdir(folder):
            raise SettingError(f"--{option.replace('_', '-')} must name a folder, and {folder} is none: name another")
    if training.markdown is not None and training.markdown.is_dir():
        raise SettingError(f"--markdown must name a file, and {training.markdown} is a folder: name a file in it")
    if training.source is None:
        the_task = task(training.task or TASK)
        settings = _settings(training, the_task.settings, workers, quick)
        if simulated:
            simulate(workers)
        data_mesh(1 if training.one_device else settings.workers, settings.axis_name)
        problem = the_task.on(load(the_task.dataset, data_dir=training.data_dir))
    else:
        both = {"--task": training.task, "--batch": training.batch, "--data-dir": training.data_dir}
        for option, value in both.items():
            if value is not None:
                raise SettingError(f"--from brings its own data and batches: drop {option}")
        if simulated:
            # JAX may look for devices while the function runs.
            simulate(workers)
        problem = own_problem(training.source, imported(training.source))
        settings = _settings(training, problem.settings, workers, quick)
        data_mesh(1 if training.one_device else settings.workers, settings.axis_name)
    problem.steps_per_epoch(settings)
    return problem, settings


def _settings(training: Training, own: Settings, workers: int, quick: bool) -> Settings:
    """Returns the task's settings with what the user has said instead."""
    # The batch stays what it is when the workers change, and with it the training problem.
    try:
        shared = split_batch(own.batch if training.batch is None else training.batch, workers)
    except SettingError as error:
        if training.source is None:
            raise
        raise SettingError(f"{training.source}: {error}, or --workers that divide it") from error
    given = {name: getattr(training, name) for name in _SAID if getattr(training, name) is not None}
    if quick:
        given.setdefault("epochs", max(own.epochs // 10, 1))
    return dataclasses.replace(own, workers=workers, batch_per_worker=shared, **given)


def simulate(workers: int) -> None:
    """Makes this process's CPU appear as ``workers`` devices.

    JAX reads the flag when it first looks for devices, not when it is imported. A process that has
    looked already keeps the devices it has; a mesh that needs more then says so.
    """
    _SIMULATED.check("simulated workers", workers)
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*kept, f"{_FLAG}={workers}"])
    jax.config.update("jax_platforms", "cpu")


def advice(checkpoint: pathlib.Path | None) -> str:
    """Says how to continue a run that was stopped."""
    if checkpoint is None:
        return "nothing was saved (with --checkpoint FOLDER a run goes on from the last epoch saved)"
    return f"the same command goes on from the last epoch saved in {checkpoint}"


def logged(log_dir: pathlib.Path | None) -> contextlib.AbstractContextManager[Listener]:
    """Returns what writes event files, or nothing where no folder is named."""
    return contextlib.nullcontext(Listener()) if log_dir is None else EventFiles(log_dir)


def make_folder(folder: pathlib.Path) -> None:
    """Makes the folder of the results, before anything is run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not only a look at its mode: a file system may be read-only.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise SettingError(f"cannot write to {folder}: {error.strerror}: name another with --out") from error


def finish(console: Console, result: Comparison, training: Training, stem: str, command: str) -> None:
    """Prints the table and its notes, then writes the picture, the JSON and, if wanted, the Markdown.

    Each is written whole. A link where the picture or the JSON belongs is replaced, and not what it leads to; a
    link that the user names for the Markdown is followed.
    """
    # Half a second, which only a command that draws should take.
    from gradcomp_jax.cli.plot import picture_of

    stem = f"{stem}-{result.dataset.replace(':', '-')}"
    picture, figures, page = training.out / f"{stem}.png", training.out / f"{stem}.json", training.markdown
    tell(console, report.title(result), "bold")
    console.print()
    print_table(console, report.table(result), f"{figures} has all")
    console.print()
    for note in report.notes(result):
        tell(console, note, "dim")
    write_result(console, figures, result.to_json(command=command))
    write_result(console, picture, picture_of(result))
    if page is not None:
        write_result(console, page, report.markdown(result, command=command), follow=True)
