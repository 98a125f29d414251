"""Simulates workers on one device, each a lane of a ``vmap``, to see what a method does to training, never its speed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh

from gradcomp_jax._typing import PyTree
from gradcomp_jax.core.overwritten import trained
from gradcomp_jax.training.resize import array_of, on_marks, put
from gradcomp_jax.training.state import TrainState, lift_replicas, state_axes
from gradcomp_jax.training.step import TrainStep, make_train_step, worker_step


def simulated_state(
    params: PyTree, tx: optax.GradientTransformation, workers: int, *, axis_name: str = "data", replicas: bool = False
) -> TrainState:
    """Returns a fresh train state of workers that share a device.

    Its arrays have the shapes that they have on a mesh of ``workers`` devices.
    """

    def start(params: PyTree) -> TrainState:
        state = TrainState(jnp.zeros((), jnp.int32), params, tx.init(trained(params)))
        return lift_replicas(state) if replicas else state

    def every(params: PyTree) -> TrainState:
        lanes: dict[str, Any] = {"axis_name": axis_name, "axis_size": workers, "in_axes": None}
        axes = state_axes(jax.eval_shape(jax.vmap(start, **lanes), params))
        return _joined(jax.vmap(start, out_axes=axes, **lanes)(params))

    # Copied, because the step donates its state and must not take the caller's parameters.
    return jax.jit(every)(jax.tree.map(jnp.array, params))


def make_simulated_step(
    loss: Callable[[PyTree, Any], Any], tx: optax.GradientTransformation, workers: int, *, axis_name: str = "data"
) -> Any:
    """Compiles ``step(state, batch) -> (state, metrics)`` for workers that share a device, as :func:`make_train_step` does.

    The state is that of :func:`simulated_state`, and is donated. Nothing is sent, so there are no bytes to count.
    """
    local = worker_step(loss, tx, axis_name=axis_name)

    def split(x: Any) -> Any:
        return x.reshape(workers, -1, *x.shape[1:])

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        axes = state_axes(state)
        mapped = jax.vmap(local, axis_name=axis_name, in_axes=(axes, 0), out_axes=(axes, None, 0), axis_size=workers)
        new, metrics, _ = mapped(
            on_marks(state, lambda mark: put(mark, split(array_of(mark)))), jax.tree.map(split, batch)
        )
        return _joined(new), metrics

    return TrainStep(jax.jit(step, donate_argnums=0), Mesh(jax.devices()[:1], (axis_name,)), donates=True)


def sent_program(
    loss: Callable[[PyTree, Any], Any],
    tx: optax.GradientTransformation,
    workers: int,
    state: TrainState,
    batch: PyTree,
    *,
    axis_name: str = "data",
) -> str:
    """Returns the HLO text of the step on one device for each worker, for :func:`gradcomp_jax.wire_bytes`.

    It is lowered for CPU, for as many devices as there are workers, and not compiled: shapes and dtypes alone matter.
    """
    mesh: Any = AbstractMesh((workers,), (axis_name,), axis_types=(AxisType.Auto,))
    state, batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, batch))
    traced = make_train_step(loss, tx, mesh, axis_name=axis_name).trace(state, batch)
    return traced.lower(lowering_platforms=("cpu",)).as_text(dialect="hlo")


def _joined(state: TrainState) -> TrainState:
    """Lays the workers' rows one after the other."""
    return on_marks(state, lambda mark: put(mark, array_of(mark).reshape(-1, *array_of(mark).shape[2:])))
