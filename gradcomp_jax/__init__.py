"""Gradient compression for JAX, as plain optax transformations."""

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
from gradcomp_jax.methods import block_quantized as block_quantized
from gradcomp_jax.methods import demo as demo
from gradcomp_jax.methods import dense as dense
from gradcomp_jax.methods import dgc as dgc
from gradcomp_jax.methods import eden as eden
from gradcomp_jax.methods import ef21 as ef21
from gradcomp_jax.methods import ef_sign_sgd as ef_sign_sgd
from gradcomp_jax.methods import factored_dot as factored_dot
from gradcomp_jax.methods import fp8 as fp8
from gradcomp_jax.methods import gradient_dropping as gradient_dropping
from gradcomp_jax.methods import one_bit_adam as one_bit_adam
from gradcomp_jax.methods import one_bit_sgd as one_bit_sgd
from gradcomp_jax.methods import powersgd as powersgd
from gradcomp_jax.methods import qsgd as qsgd
from gradcomp_jax.methods import random_k as random_k
from gradcomp_jax.methods import sign_sgd as sign_sgd
from gradcomp_jax.methods import sparcml as sparcml
from gradcomp_jax.methods import stochastic_rounding as stochastic_rounding
from gradcomp_jax.methods import terngrad as terngrad
from gradcomp_jax.methods import topk_sgd as topk_sgd
from gradcomp_jax.per_device import PerDevice as PerDevice
from gradcomp_jax.planning import Cluster as Cluster
from gradcomp_jax.planning import Link as Link
from gradcomp_jax.planning import Workload as Workload
from gradcomp_jax.planning import calibrate as calibrate
from gradcomp_jax.planning import predict as predict
from gradcomp_jax.planning import profile_step as profile_step
from gradcomp_jax.planning import should_compress as should_compress
from gradcomp_jax.replicas import accumulate as accumulate
from gradcomp_jax.replicas import consolidate as consolidate
from gradcomp_jax.replicas import delayed_average as delayed_average
from gradcomp_jax.replicas import diloco as diloco
from gradcomp_jax.replicas import elastic_average as elastic_average
from gradcomp_jax.replicas import gossip as gossip
from gradcomp_jax.replicas import local_sgd as local_sgd
from gradcomp_jax.replicas import mean_wire_bytes as mean_wire_bytes
from gradcomp_jax.replicas import outer_average as outer_average
from gradcomp_jax.replicas import replica_spread as replica_spread
from gradcomp_jax.replicas import sparse_loco as sparse_loco
from gradcomp_jax.replicas import staleness as staleness
from gradcomp_jax.training import TrainState as TrainState
from gradcomp_jax.training import data_sharding as data_sharding
from gradcomp_jax.training import init_state as init_state
from gradcomp_jax.training import local_value_and_grad as local_value_and_grad
from gradcomp_jax.training import lower_update as lower_update
from gradcomp_jax.training import make_overlapped_step as make_overlapped_step
from gradcomp_jax.training import make_train_step as make_train_step
from gradcomp_jax.training import resize_workers as resize_workers
from gradcomp_jax.training import restore_checkpoint as restore_checkpoint
from gradcomp_jax.training import save_checkpoint as save_checkpoint
from gradcomp_jax.training import state_axes as state_axes
from gradcomp_jax.training import state_shardings as state_shardings
from gradcomp_jax.training import state_specs as state_specs
from gradcomp_jax.transforms import ExchangeState as ExchangeState
from gradcomp_jax.transforms import bucketed as bucketed
from gradcomp_jax.transforms import by_path as by_path
from gradcomp_jax.transforms import by_size as by_size
from gradcomp_jax.transforms import density_controller as density_controller
from gradcomp_jax.transforms import density_schedule as density_schedule
from gradcomp_jax.transforms import exchange as exchange
from gradcomp_jax.transforms import forward_order as forward_order
from gradcomp_jax.transforms import hierarchical as hierarchical
from gradcomp_jax.transforms import local_clip as local_clip
from gradcomp_jax.transforms import masks as masks
from gradcomp_jax.transforms import model_parallel as model_parallel
from gradcomp_jax.transforms import rate_weighted as rate_weighted
from gradcomp_jax.transforms import running_sum as running_sum
from gradcomp_jax.transforms import warm_up as warm_up

__all__ = [
    "Cluster",
    "ExchangeState",
    "Link",
    "PerDevice",
    "TrainState",
    "WireReport",
    "Workload",
    "accumulate",
    "block_quantized",
    "bucketed",
    "by_path",
    "by_size",
    "calibrate",
    "collectives",
    "compressors",
    "consolidate",
    "data_sharding",
    "delayed_average",
    "demo",
    "dense",
    "density_controller",
    "density_schedule",
    "dgc",
    "diloco",
    "eden",
    "ef21",
    "ef_sign_sgd",
    "elastic_average",
    "exchange",
    "factored_dot",
    "forward_order",
    "fp8",
    "gossip",
    "gradient_dropping",
    "hierarchical",
    "init_state",
    "kernels",
    "local_clip",
    "local_sgd",
    "local_value_and_grad",
    "lower_update",
    "make_overlapped_step",
    "make_train_step",
    "masks",
    "mean_wire_bytes",
    "memory",
    "methods",
    "model_parallel",
    "one_bit_adam",
    "one_bit_sgd",
    "outer_average",
    "planning",
    "powersgd",
    "predict",
    "profile_step",
    "qsgd",
    "random_k",
    "rate_weighted",
    "replica_spread",
    "replicas",
    "resize_workers",
    "restore_checkpoint",
    "running_sum",
    "save_checkpoint",
    "should_compress",
    "sign_sgd",
    "sparcml",
    "sparse_loco",
    "staleness",
    "state_axes",
    "state_shardings",
    "state_specs",
    "stochastic_rounding",
    "terngrad",
    "topk_sgd",
    "warm_up",
    "wire_bytes",
]


__version__ = "0.1.0"
