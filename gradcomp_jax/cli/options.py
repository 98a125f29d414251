"""The options that the commands which train share, each with its help."""

import dataclasses
import functools
import inspect
import pathlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from gradcomp_jax.cli import ranges
from gradcomp_jax.distributed import cluster
from gradcomp_jax.experiments.settings import RANGES
from gradcomp_jax.experiments.tasks import TASKS

WORKERS = 8
TASK = "digits"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What ``compare`` and ``train`` are both told."""

    task: Annotated[
        str | None, typer.Option("--task", "--dataset", help=f"What to train: {', '.join(TASKS)}.", show_default=TASK)
    ] = None
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="MODULE:FUNCTION",
            help="Or a task of your own: a function that returns (loss, params, batches) or (loss, params, batches,"
            " evaluation); docs/commands.md has an example.",
        ),
    ] = None
    workers: Annotated[
        int | None,
        ranges.number(
            RANGES["workers"], "Devices that share every batch.", show_default=f"the task's own; {WORKERS} of --from"
        ),
    ] = None
    epochs: Annotated[
        int | None, ranges.number(RANGES["epochs"], "Passes over the training set.", show_default="the task's own")
    ] = None
    batch: Annotated[
        int | None,
        ranges.number(
            RANGES["batch_per_worker"], "Examples in a step, all workers together.", show_default="the task's own"
        ),
    ] = None
    learning_rate: Annotated[
        float | None,
        ranges.number(RANGES["learning_rate"], "Learning rate of the optimizer.", show_default="the task's own"),
    ] = None
    momentum: Annotated[float | None, ranges.number(RANGES["momentum"], "Momentum.", show_default="0.9")] = None
    density: Annotated[
        float | None,
        ranges.number(
            RANGES["density"],
            "Fraction of the entries that methods with a selection send.",
            show_default="the task's own",
        ),
    ] = None
    delay: Annotated[
        int | None, ranges.number(RANGES["delay"], "Steps until a delayed average arrives.", show_default="4")
    ] = None
    every: Annotated[
        int | None,
        ranges.number(RANGES["every"], "Steps between exchanges, of methods that skip some.", show_default="4"),
    ] = None
    checkpoint: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="Save every epoch in this folder, and go on from what is there; a run that is complete is not trained"
            " again."
        ),
    ] = None
    log_dir: Annotated[
        pathlib.Path | None,
        typer.Option(help="Write TensorBoard event files, in a folder within this one for each method and seed."),
    ] = None
    data_dir: Annotated[
        pathlib.Path | None, typer.Option(help="Folder of the data set's files, if not where its package puts them.")
    ] = None
    real_devices: Annotated[
        bool, typer.Option("--real-devices", help="Use the devices that JAX finds instead of simulated CPU workers.")
    ] = False
    one_device: Annotated[
        bool,
        typer.Option("--one-device", help="Let all workers share the first device that JAX finds, such as one GPU."),
    ] = False
    out: Annotated[pathlib.Path, typer.Option(help="Folder for the picture and the JSON.")] = pathlib.Path(
        "gradcomp-results"
    )
    markdown: Annotated[pathlib.Path | None, typer.Option(help="Also write the table to this Markdown file.")] = None

    def must_be_equal(self) -> dict[str, Any]:
        """Returns what all processes of a run must be told alike, by the options' names."""
        own = ("checkpoint", "log_dir", "data_dir", "out", "markdown")
        names = {f.name: "--" + f.name.replace("_", "-") for f in dataclasses.fields(self)} | {"source": "--from"}
        shared = {option: getattr(self, name) for name, option in names.items() if name not in own}
        # A folder may have another name on each machine.
        return shared | {"--checkpoint": None if self.checkpoint is None else "FOLDER"}


def with_training_options(command: Callable[..., None], names: Sequence[str] | None = None) -> Callable[..., None]:
    """Makes a command of ``command(training, **own)`` that takes the fields of :class:`Training` after its own options.

    With ``names`` it takes these fields alone, and the others have their defaults.
    """
    own = list(inspect.signature(command).parameters.values())[1:]
    fields = [f for f in dataclasses.fields(Training) if names is None or f.name in names]
    kind = inspect.Parameter.KEYWORD_ONLY
    shared = [inspect.Parameter(f.name, kind, default=f.default, annotation=f.type) for f in fields]
    parameters = [*(p.replace(kind=kind) for p in own), *shared]

    @functools.wraps(command)
    def called(**given: Any) -> None:
        training = Training(**{f.name: given.pop(f.name) for f in fields})
        command(training, **given)

    # What typer reads the options from.
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    return called


Distributed = Annotated[
    bool,
    typer.Option(
        "--distributed",
        help="One of several processes of jax.distributed: the workers are the devices of all of them. Where SLURM, "
        "Open MPI, Cloud TPU or Kubernetes started them, nothing else need be said.",
    ),
]
Coordinator = Annotated[
    str | None, typer.Option(help=f"HOST:PORT of process 0, for --distributed; else ${cluster.ADDRESS}.")
]
Process = Annotated[
    int | None, ranges.number(ranges.PROCESS, f"Number of this process, for --distributed; else ${cluster.INDEX}.")
]
Processes = Annotated[
    int | None,
    ranges.number(ranges.PROCESSES, f"How many processes there are, for --distributed; else ${cluster.COUNT}."),
]
Heartbeat = Annotated[
    int,
    ranges.number(ranges.HEARTBEAT, "Seconds without a word from a process until the others end, for --distributed."),
]
StepTimeout = Annotated[
    float, ranges.number(ranges.SECONDS, "Seconds that a step, a compilation or a save may take, for --distributed.")
]
VerifyEvery = Annotated[
    int,
    ranges.number(
        ranges.EVERY,
        "Steps from one comparison of the parameters, on all devices of all processes, to the next; 0 for none.",
    ),
]
