"""Train state, train step, a change of the number of workers, checkpoints."""

from gradcomp_jax.training.checkpoint import restore_checkpoint as restore_checkpoint
from gradcomp_jax.training.checkpoint import save_checkpoint as save_checkpoint
from gradcomp_jax.training.checkpoint_record import checkpoint_metadata as checkpoint_metadata
from gradcomp_jax.training.diagnostics import diagnostics as diagnostics
from gradcomp_jax.training.gathered import gather_params as gather_params
from gradcomp_jax.training.gradients import local_value_and_grad as local_value_and_grad
from gradcomp_jax.training.initial import init_opt_state as init_opt_state
from gradcomp_jax.training.initial import init_state as init_state
from gradcomp_jax.training.lowering import lower_update as lower_update
from gradcomp_jax.training.overlapped import OverlappedStep as OverlappedStep
from gradcomp_jax.training.overlapped import make_overlapped_step as make_overlapped_step
from gradcomp_jax.training.overlapped_outer import make_overlapped_outer_step as make_overlapped_outer_step
from gradcomp_jax.training.replaced_method import replace_method as replace_method
from gradcomp_jax.training.resize import resize_workers as resize_workers
from gradcomp_jax.training.state import TrainState as TrainState
from gradcomp_jax.training.state import data_sharding as data_sharding
from gradcomp_jax.training.state import state_axes as state_axes
from gradcomp_jax.training.state import state_shardings as state_shardings
from gradcomp_jax.training.state import state_specs as state_specs
from gradcomp_jax.training.step import make_train_step as make_train_step
from gradcomp_jax.training.unreduced import unreduced as unreduced
