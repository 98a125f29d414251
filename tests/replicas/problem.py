"""Workers with targets of their own: a quadratic whose gradient NumPy can write down."""

import jax
import jax.numpy as jnp
import numpy as np

AXIS = "data"
N = 4


def mesh_of(workers: int = N) -> jax.sharding.Mesh:
    kind = jax.sharding.AxisType.Auto
    return jax.make_mesh((workers,), (AXIS,), axis_types=(kind,), devices=jax.devices()[:workers])


def params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"b": np.float32(0.5) + np.zeros((), np.float32), "w": rng.normal(size=(5, 3)).astype(np.float32)}


def batch(step: int, workers: int = N) -> dict[str, np.ndarray]:
    """For each worker a scale and a target."""
    rng = np.random.default_rng(100 + step)
    scale = 1 + rng.random((workers, 5, 3))
    return {"a": scale.astype(np.float32), "y": rng.normal(size=(workers, 5, 3)).astype(np.float32)}


def loss(p, batch):
    return jnp.mean(jnp.sum(0.5 * (batch["a"] * p["w"] + p["b"] - batch["y"]) ** 2, axis=(1, 2)))


def gradient(x: dict[str, np.ndarray], step: int, worker: int, workers: int = N) -> dict[str, np.ndarray]:
    """Of one worker's loss, float64."""
    one = {k: v[worker].astype(np.float64) for k, v in batch(step, workers).items()}
    off = one["a"] * x["w"] + x["b"] - one["y"]
    return {"b": off.sum(), "w": one["a"] * off}


def start(workers: int = N) -> list[dict[str, np.ndarray]]:
    """Equal replicas, float64."""
    return [{k: v.astype(np.float64) for k, v in params().items()} for _ in range(workers)]


def each(function, *trees):
    return {k: function(*(t[k] for t in trees)) for k in trees[0]}


def mean(trees):
    return each(lambda *x: sum(x) / len(x), *trees)


def replicas(state) -> list[dict[str, np.ndarray]]:
    """Every worker's parameters."""
    host = {k: np.asarray(v.value) for k, v in state.params.items()}
    return [{k: v[i] for k, v in host.items()} for i in range(host["b"].shape[0])]


def close(state, oracle, tolerance: float = 2e-5) -> None:
    for got, want in zip(replicas(state), oracle, strict=True):
        for k in want:
            np.testing.assert_allclose(got[k], want[k], rtol=tolerance, atol=tolerance)
