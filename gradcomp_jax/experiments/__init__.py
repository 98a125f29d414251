"""Data sets, networks, one training run, and the comparison of methods.

Nothing here prints or parses arguments: the command line does.
"""

from gradcomp_jax._errors import ExperimentError, MissingDataError, SettingError, UnknownNameError
from gradcomp_jax.experiments.compare import Comparison, MethodResult, compare, count_baselines, summarize
from gradcomp_jax.experiments.datasets import Dataset, load
from gradcomp_jax.experiments.resume import train_with_checkpoints
from gradcomp_jax.experiments.run import Listener, Past, RunResult, StepTime, Trainer, Wire, data_mesh, train
from gradcomp_jax.experiments.settings import Settings
from gradcomp_jax.experiments.tasks import Task, task

__all__ = [
    "Comparison",
    "Dataset",
    "ExperimentError",
    "Listener",
    "MethodResult",
    "MissingDataError",
    "Past",
    "RunResult",
    "SettingError",
    "Settings",
    "StepTime",
    "Task",
    "Trainer",
    "UnknownNameError",
    "Wire",
    "compare",
    "count_baselines",
    "data_mesh",
    "load",
    "summarize",
    "task",
    "train",
    "train_with_checkpoints",
]
