"""A small regression that the training tests share."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

BATCH = 24


def params() -> dict[str, np.ndarray]:
    """A matrix of several rows of a block, a narrow one, a bias."""
    rng = np.random.default_rng(0)
    return {
        "w": (rng.normal(size=(12, 8)) / 3).astype(np.float32),
        "v": rng.normal(size=(8, 2)).astype(ml_dtypes.bfloat16),
        "b": np.zeros(8, np.float32),
    }


def loss(p, batch):
    hidden = jnp.tanh(batch["x"] @ p["w"] + p["b"])
    return jnp.mean((hidden @ p["v"].astype(jnp.float32) - batch["y"]) ** 2)


def batch(seed: int) -> dict[str, np.ndarray]:
    """Divides among 1, 2, 3, 4, 6 and 8 workers."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(BATCH, 12)).astype(np.float32)
    return {"x": x, "y": np.stack([x[:, 0], x[:, 1] * x[:, 2]], axis=1)}


def mesh_of(workers: int, *, explicit: bool = False) -> jax.sharding.Mesh:
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    return jax.make_mesh((workers,), ("data",), axis_types=(kind,), devices=jax.devices()[:workers])


def on(mesh: jax.sharding.Mesh, tree):
    """Split along the workers, as explicit axes want their arguments."""
    return jax.device_put(tree, NamedSharding(mesh, P("data")))
