"""What the commands that train have in common: settings, simulated devices, data, and what is left behind."""

import dataclasses
import os
import pathlib
from typing import Any

import jax
from rich.console import Console

from gradcomp_jax._errors import SettingError
from gradcomp_jax.cli import report
from gradcomp_jax.experiments import Comparison, Dataset, Settings, Task, data_mesh, load
from gradcomp_jax.experiments.recipes import RECIPES
from gradcomp_jax.experiments.settings import split_batch

METHODS = ", ".join(RECIPES)
OUT = pathlib.Path("gradcomp-results")
WORKERS = 8
_FLAG = "--xla_force_host_platform_device_count"


_SAID = ("epochs", "learning_rate", "momentum", "density", "delay", "every")


def make_settings(the_task: Task, workers: int, batch: int | None, *said: Any) -> Settings:
    """Returns the task's settings with what the user has said in their place: ``epochs`` and so on, or ``None``."""
    # The batch stays what it is when the workers change, and with it the training problem.
    shared = split_batch(the_task.settings.batch if batch is None else batch, workers)
    given = {name: value for name, value in zip(_SAID, said, strict=True) if value is not None}
    return dataclasses.replace(the_task.settings, workers=workers, batch_per_worker=shared, **given)


def simulate(workers: int) -> None:
    """Makes this process's CPU appear as ``workers`` devices.

    JAX reads the flag when it first looks for devices, not when it is imported. A process that has
    looked already keeps the devices it has; a mesh that needs more then says so.
    """
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*kept, f"{_FLAG}={workers}"])
    jax.config.update("jax_platforms", "cpu")


def load_data(dataset: str, data_dir: pathlib.Path | None, settings: Settings) -> Dataset:
    """Reads the data, and makes sure before anything is drawn that a run can start."""
    data_mesh(settings.workers, settings.axis_name)
    data = load(dataset, data_dir=data_dir)
    settings.steps_per_epoch(len(data.train_x))
    return data


def make_folder(folder: pathlib.Path) -> None:
    """Makes the folder of the results, before anything is run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"cannot write to {folder}: {error}") from error


def write(
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


def show(console: Console, result: Comparison, written: list[pathlib.Path]) -> None:
    """Prints the table, its notes and what was written."""
    console.print(report.title(result), style="bold", highlight=False)
    console.print()
    console.print(report.table(result))
    console.print()
    for note in report.notes(result):
        console.print(note, style="dim", highlight=False)
    for path in written:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
