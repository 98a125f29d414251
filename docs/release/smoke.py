"""Takes one step with the gradcomp_jax that is installed. A release is tried so, in an environment without anything else."""

import importlib.metadata
import math
import os
import platform
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np

import gradcomp_jax as gc

if not Path(gc.__file__).is_relative_to(sys.prefix):
    sys.exit(f"{gc.__file__} is not what is installed in {sys.prefix}: run this outside the folder of a checkout")
if (installed := importlib.metadata.version("gradcomp-jax")) != gc.__version__:
    sys.exit(f"the package says {gc.__version__}, and what is installed says {installed}")

mesh = jax.make_mesh((4,), ("data",))
params = {"w": jnp.zeros((64, 64))}
tx = gc.adamw(1e-2, gc.block_quantized(axis_name="data", bits=4))
state = gc.init_state(params, tx, mesh, axis_name="data")
step = gc.make_train_step(
    lambda params, batch: jnp.mean((batch @ params["w"] - batch) ** 2), tx, mesh, axis_name="data"
)
batch = jax.device_put(np.eye(64, dtype="float32"), gc.data_sharding(mesh, axis_name="data"))
sent = gc.wire_bytes(step.lower(state, batch).compile()).sent
state, metrics = step(state, batch)
moved = float(jnp.abs(state.params["w"]).max())
dense = 2 * 3 / 4 * 2 * 64 * 64
if not (math.isfinite(metrics["loss"]) and 0 < moved < 1 and 0 < sent < dense / 2):
    sys.exit(f"loss {metrics['loss']}, largest change {moved}, bytes sent {sent}, dense bfloat16 {dense:.0f}")
print(
    f"gradcomp_jax {gc.__version__}, Python {platform.python_version()}, jax {jax.__version__}:"
    f" one step sends {sent} bytes, dense bfloat16 {dense:.0f}"
)
