"""Simulates workers on one device, each a lane of a ``vmap``, to see what a method does to training, never its speed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh

from gradcomp_jax._typing import PyTree
from gradcomp_jax.core.overwritten import trained
from gradcomp_jax.per_device import is_per_device
from gradcomp_jax.training.state import TrainState, lift_replicas, state_axes
from gradcomp_jax.training.step import TrainStep, make_train_step, worker_step


def simulated_state(
    params: PyTree,
    tx: optax.GradientTransformation,
    workers: int,
    *,
    axis_name: str = "data",
    replicas: bool = False,
) -> TrainState:
    """Returns a fresh train state of workers that share a device.

    Its arrays have the shapes that they have on a mesh of ``workers`` devices.

    Args:
        params: any tree of arrays.
        tx: an optax transformation that averages over ``axis_name``.
        workers: N, at least 1.
        axis_name: the axis of the workers.
        replicas: as for :func:`gradcomp_jax.init_state`.
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

    Args:
        loss: ``loss(params, batch) -> scalar``, the mean over the batch it sees.
        tx: an optax transformation that averages over ``axis_name``.
        workers: N, which divides the leading dimension of a batch.
        axis_name: the axis of the workers.
    """
    local = worker_step(loss, tx, axis_name=axis_name)

    def split(x: Any) -> Any:
        return x.reshape(workers, -1, *x.shape[1:])

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        axes = state_axes(state)
        mapped = jax.vmap(local, axis_name=axis_name, in_axes=(axes, 0), out_axes=(axes, None, 0), axis_size=workers)
        new, metrics, _ = mapped(_per_device(state, split), jax.tree.map(split, batch))
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

    It is lowered for CPU, for as many devices as there are workers, and is not compiled.

    Args:
        loss: as for :func:`make_simulated_step`.
        tx: as for :func:`make_simulated_step`.
        workers: as for :func:`make_simulated_step`.
        state: a state of :func:`simulated_state`; only shapes and dtypes matter.
        batch: a batch; only shapes and dtypes matter.
        axis_name: as for :func:`make_simulated_step`.
    """
    mesh: Any = AbstractMesh((workers,), (axis_name,), axis_types=(AxisType.Auto,))
    state, batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, batch))
    traced = make_train_step(loss, tx, mesh, axis_name=axis_name).trace(state, batch)
    return traced.lower(lowering_platforms=("cpu",)).as_text(dialect="hlo")


def _joined(state: TrainState) -> TrainState:
    """Lays the workers' rows one after the other."""
    return _per_device(state, lambda x: x.reshape(-1, *x.shape[2:]))


def _per_device(state: TrainState, change: Callable[[Any], Any]) -> TrainState:
    def of(node: Any) -> Any:
        return dataclasses.replace(node, value=change(node.value)) if is_per_device(node) else node

    return jax.tree.map(of, state, is_leaf=is_per_device)
