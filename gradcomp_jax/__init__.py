"""Gradient compression for JAX, as plain optax transformations."""

# ruff: noqa: E402
from gradcomp_jax import _help, _process

# The command is stopped cleanly from here on: what follows takes seconds, which its help need not wait for.
_process.take_over_if_command()
_help.answer_if_asked()

from gradcomp_jax import collectives as collectives
from gradcomp_jax import compressors as compressors
from gradcomp_jax import distributed as distributed
from gradcomp_jax import kernels as kernels
from gradcomp_jax import memory as memory
from gradcomp_jax import methods as methods
from gradcomp_jax import planning as planning
from gradcomp_jax import replicas as replicas
from gradcomp_jax.audit import WireReport as WireReport
from gradcomp_jax.audit import wire_bytes as wire_bytes
from gradcomp_jax.distributed import check_equal_start as check_equal_start
from gradcomp_jax.methods import adamw as adamw
from gradcomp_jax.methods import factored_dot as factored_dot
from gradcomp_jax.methods import sparse_adamw as sparse_adamw
from gradcomp_jax.methods.every_method import *  # noqa: F403
from gradcomp_jax.per_device import PerDevice as PerDevice
from gradcomp_jax.planning import Cluster as Cluster
from gradcomp_jax.planning import Link as Link
from gradcomp_jax.planning import Workload as Workload
from gradcomp_jax.planning import calibrate as calibrate
from gradcomp_jax.planning import choose as choose
from gradcomp_jax.planning import predict as predict
from gradcomp_jax.planning import profile_step as profile_step
from gradcomp_jax.planning import should_compress as should_compress
from gradcomp_jax.replicas import accumulate as accumulate
from gradcomp_jax.replicas import consolidate as consolidate
from gradcomp_jax.replicas import delayed_average as delayed_average
from gradcomp_jax.replicas import diloco as diloco
from gradcomp_jax.replicas import elastic_average as elastic_average
from gradcomp_jax.replicas import fragments as fragments
from gradcomp_jax.replicas import gossip as gossip
from gradcomp_jax.replicas import local_sgd as local_sgd
from gradcomp_jax.replicas import mean_wire_bytes as mean_wire_bytes
from gradcomp_jax.replicas import outer_average as outer_average
from gradcomp_jax.replicas import replica_spread as replica_spread
from gradcomp_jax.replicas import sparse_loco as sparse_loco
from gradcomp_jax.replicas import staleness as staleness
from gradcomp_jax.training import TrainState as TrainState
from gradcomp_jax.training import checkpoint_metadata as checkpoint_metadata
from gradcomp_jax.training import data_sharding as data_sharding
from gradcomp_jax.training import diagnostics as diagnostics
from gradcomp_jax.training import gather_params as gather_params
from gradcomp_jax.training import init_opt_state as init_opt_state
from gradcomp_jax.training import init_state as init_state
from gradcomp_jax.training import local_value_and_grad as local_value_and_grad
from gradcomp_jax.training import lower_update as lower_update
from gradcomp_jax.training import make_overlapped_outer_step as make_overlapped_outer_step
from gradcomp_jax.training import make_overlapped_step as make_overlapped_step
from gradcomp_jax.training import make_train_step as make_train_step
from gradcomp_jax.training import replace_method as replace_method
from gradcomp_jax.training import resize_workers as resize_workers
from gradcomp_jax.training import restore_checkpoint as restore_checkpoint
from gradcomp_jax.training import save_checkpoint as save_checkpoint
from gradcomp_jax.training import state_axes as state_axes
from gradcomp_jax.training import state_shardings as state_shardings
from gradcomp_jax.training import state_specs as state_specs
from gradcomp_jax.training import unreduced as unreduced
from gradcomp_jax.transforms import ExchangeState as ExchangeState
from gradcomp_jax.transforms import bucketed as bucketed
from gradcomp_jax.transforms import by_path as by_path
from gradcomp_jax.transforms import by_size as by_size
from gradcomp_jax.transforms import density_controller as density_controller
from gradcomp_jax.transforms import density_schedule as density_schedule
from gradcomp_jax.transforms import dynamic_loss_scale as dynamic_loss_scale
from gradcomp_jax.transforms import exchange as exchange
from gradcomp_jax.transforms import forward_order as forward_order
from gradcomp_jax.transforms import hierarchical as hierarchical
from gradcomp_jax.transforms import local_clip as local_clip
from gradcomp_jax.transforms import loss_scale as loss_scale
from gradcomp_jax.transforms import masks as masks
from gradcomp_jax.transforms import master_weights as master_weights
from gradcomp_jax.transforms import model_parallel as model_parallel
from gradcomp_jax.transforms import rate_weighted as rate_weighted
from gradcomp_jax.transforms import reset_nonfinite as reset_nonfinite
from gradcomp_jax.transforms import running_sum as running_sum
from gradcomp_jax.transforms import set_choice as set_choice
from gradcomp_jax.transforms import set_to_zero as set_to_zero
from gradcomp_jax.transforms import switched as switched
from gradcomp_jax.transforms import warm_up as warm_up
from gradcomp_jax.transforms import weighted as weighted

__version__ = "0.1.0"
