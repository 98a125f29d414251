"""Gradient compression for JAX, as plain optax transformations."""

from gradcomp_jax import collectives as collectives
from gradcomp_jax import compressors as compressors
from gradcomp_jax import kernels as kernels
from gradcomp_jax import memory as memory
from gradcomp_jax.audit import WireReport as WireReport
from gradcomp_jax.audit import wire_bytes as wire_bytes
from gradcomp_jax.methods import dense as dense
from gradcomp_jax.methods import dgc as dgc
from gradcomp_jax.methods import terngrad as terngrad
from gradcomp_jax.per_device import PerDevice as PerDevice
from gradcomp_jax.training import TrainState as TrainState
from gradcomp_jax.training import data_sharding as data_sharding
from gradcomp_jax.training import init_state as init_state
from gradcomp_jax.training import local_value_and_grad as local_value_and_grad
from gradcomp_jax.training import lower_update as lower_update
from gradcomp_jax.training import make_train_step as make_train_step
from gradcomp_jax.training import resize_workers as resize_workers
from gradcomp_jax.training import restore_checkpoint as restore_checkpoint
from gradcomp_jax.training import save_checkpoint as save_checkpoint
from gradcomp_jax.training import state_axes as state_axes
from gradcomp_jax.training import state_shardings as state_shardings
from gradcomp_jax.training import state_specs as state_specs
from gradcomp_jax.transforms import ExchangeState as ExchangeState
from gradcomp_jax.transforms import exchange as exchange
from gradcomp_jax.transforms import local_clip as local_clip
from gradcomp_jax.transforms import warm_up as warm_up

__all__ = [
    "ExchangeState",
    "PerDevice",
    "TrainState",
    "WireReport",
    "collectives",
    "compressors",
    "data_sharding",
    "dense",
    "dgc",
    "exchange",
    "init_state",
    "kernels",
    "local_clip",
    "local_value_and_grad",
    "lower_update",
    "make_train_step",
    "memory",
    "resize_workers",
    "restore_checkpoint",
    "save_checkpoint",
    "state_axes",
    "state_shardings",
    "state_specs",
    "terngrad",
    "warm_up",
    "wire_bytes",
]


__version__ = "0.1.0"
