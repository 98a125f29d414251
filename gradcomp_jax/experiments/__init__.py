"""Data sets, networks, one training run, and the comparison of methods.

Nothing here prints or parses arguments: the command line does.
"""

from gradcomp_jax._errors import ExperimentError as ExperimentError
from gradcomp_jax._errors import MissingDataError as MissingDataError
from gradcomp_jax._errors import SettingError as SettingError
from gradcomp_jax._errors import UnknownNameError as UnknownNameError
from gradcomp_jax.experiments.compare import Comparison as Comparison
from gradcomp_jax.experiments.compare import MethodResult as MethodResult
from gradcomp_jax.experiments.compare import compare as compare
from gradcomp_jax.experiments.compare import count_baselines as count_baselines
from gradcomp_jax.experiments.compare import summarize as summarize
from gradcomp_jax.experiments.datasets import Data as Data
from gradcomp_jax.experiments.datasets import Dataset as Dataset
from gradcomp_jax.experiments.datasets import Text as Text
from gradcomp_jax.experiments.datasets import load as load
from gradcomp_jax.experiments.listeners import Listener as Listener
from gradcomp_jax.experiments.listeners import Listeners as Listeners
from gradcomp_jax.experiments.listeners import Past as Past
from gradcomp_jax.experiments.own_task import own_problem as own_problem
from gradcomp_jax.experiments.problem import Problem as Problem
from gradcomp_jax.experiments.results import Metric as Metric
from gradcomp_jax.experiments.results import RunResult as RunResult
from gradcomp_jax.experiments.results import StepTime as StepTime
from gradcomp_jax.experiments.results import Wire as Wire
from gradcomp_jax.experiments.results import show as show
from gradcomp_jax.experiments.resume import train_with_checkpoints as train_with_checkpoints
from gradcomp_jax.experiments.run import Trainer as Trainer
from gradcomp_jax.experiments.run import data_mesh as data_mesh
from gradcomp_jax.experiments.settings import Settings as Settings
from gradcomp_jax.experiments.tasks import Task as Task
from gradcomp_jax.experiments.tasks import task as task
