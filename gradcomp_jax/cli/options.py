"""The options of the commands, each with its help."""

import pathlib
from typing import Annotated

import typer

from gradcomp_jax.distributed import cluster
from gradcomp_jax.experiments.tasks import TASKS

_DATASETS = ", ".join(TASKS)

Dataset = Annotated[str, typer.Option(help=f"What to train on: {_DATASETS}.")]
DataDir = Annotated[
    pathlib.Path | None, typer.Option(help="Folder of the data set's files, if not where its package puts them.")
]
Workers = Annotated[int, typer.Option(help="Devices that share every batch.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over the training set; the task's own by default.")]
Batch = Annotated[int | None, typer.Option(help="Examples in a step, all workers together; the task's own by default.")]
Rate = Annotated[float | None, typer.Option(help="Learning rate; the task's own by default.")]
Momentum = Annotated[float | None, typer.Option(help="Momentum, in [0, 1).")]
Density = Annotated[
    float | None, typer.Option(help="Fraction of the entries that DGC sends, in (0, 1]; the task's own by default.")
]
Delay = Annotated[
    int | None, typer.Option(help="Steps until a delayed average arrives; 4 by default.", show_default=False)
]
Every = Annotated[
    int | None,
    typer.Option(help="Steps between exchanges, of methods that skip some; 4 by default.", show_default=False),
]
Real = Annotated[
    bool, typer.Option("--real-devices", help="Use the devices that JAX finds instead of simulated CPU workers.")
]
Out = Annotated[pathlib.Path, typer.Option(help="Folder for the picture and the JSON.")]

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
    int | None, typer.Option(help=f"Number of this process, from 0, for --distributed; else ${cluster.INDEX}.")
]
Processes = Annotated[
    int | None, typer.Option(help=f"How many processes there are, for --distributed; else ${cluster.COUNT}.")
]
Heartbeat = Annotated[
    int, typer.Option(min=1, help="Seconds without a word from a process until the others end, for --distributed.")
]
StepTimeout = Annotated[
    float, typer.Option(min=1, help="Seconds that a step, a compilation or a save may take, for --distributed.")
]

Markdown = Annotated[pathlib.Path | None, typer.Option(help="Also write the table to this Markdown file.")]
