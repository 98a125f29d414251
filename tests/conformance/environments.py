"""The same transformation mapped over workers in every supported form."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec

import gradcomp_jax as gc

WORKERS = 8
AXIS = "data"
ENVIRONMENTS = ("shard_map-auto-vma", "shard_map-auto", "shard_map-explicit-vma", "shard_map-explicit", "pmap", "vmap")

FEWER = ("shard_map-explicit-vma", "vmap")
"""Several devices and one, tracked and not."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """``init(params)`` gives a global state; ``update(gradients, state, params)`` takes gradients stacked by worker.

    The updates come back stacked by worker as well, so that a difference between replicas shows. ``jitted`` is the
    compiled function behind ``update``, where there is one.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]
    jitted: Any
    rows_first: bool


def rows_of_owners(value: Any, workers: int) -> np.ndarray:
    """What owners have, row after row: they take rows in turn, and each keeps its own together."""
    owned = np.asarray(value)
    return owned.reshape(workers, -1, owned.shape[-1]).swapaxes(0, 1).reshape(-1, owned.shape[-1])


def owners_of_leaf(mark: gc.PerDevice, size: int, workers: int, *, dealt: bool) -> np.ndarray:
    """An owner's residual of a group with a single leaf, in the order of its entries."""
    rows = rows_of_owners(mark.value, workers)[: mark.rows]
    return (rows.T if dealt else rows).reshape(-1)[:size]


def means_kept(state: gc.transforms.ExchangeState, workers: int) -> list[np.ndarray]:
    """Of each compressed tensor what all workers keep, on the mean, with what its owners do, padding included.

    One row for each device of a worker.
    """
    result = []
    for memories, server in zip(state.memory, state.server, strict=True):
        found = [getattr(m, "accumulated", m) for m in memories if jax.tree.leaves(m)]
        means = [np.asarray(m.value, np.float64).reshape(workers, m.shards, -1).mean(axis=0) for m in found]
        if isinstance(server, gc.PerDevice) and workers >= server.returns.least:
            block = server.value.shape[-1]
            each = np.asarray(server.value, np.float64).reshape(workers, server.shards, -1, block)
            for device in range(server.shards):
                rows = rows_of_owners(each[:, device].reshape(-1, block), workers)[: server.rows]
                segments = np.split(rows, np.cumsum(server.returns.rows)[:-1])
                for mean, segment in zip(means, segments, strict=True):
                    flat = (segment.T if server.returns.dealt else segment).reshape(-1)
                    mean[device] += server.returns.sign * flat[: mean.shape[1]]
        result += means
    return result


def mesh_of(kind: AxisType, workers: int = WORKERS) -> jax.sharding.Mesh:
    return jax.make_mesh((workers,), (AXIS,), axis_types=(kind,), devices=jax.devices()[:workers])


def _shard_map(tx: Any, kind: AxisType, check_vma: bool, workers: int) -> Environment:
    mesh = mesh_of(kind, workers)
    spec = PartitionSpec(AXIS)
    placed = functools.partial(jax.device_put, device=jax.NamedSharding(mesh, spec))
    replicated = functools.partial(jax.device_put, device=jax.NamedSharding(mesh, PartitionSpec()))

    def init(params: Any) -> Any:
        return gc.init_state(params, tx, mesh, axis_name=AXIS).opt_state

    def local(gradient: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(jax.tree.map(lambda a: a[0], gradient), state, params)
        return jax.tree.map(lambda a: a[None], updates), state

    @jax.jit
    def update(gradient: Any, state: Any, params: Any) -> Any:
        specs = gc.state_specs(state, axis_name=AXIS)
        return jax.shard_map(
            local, mesh=mesh, in_specs=(spec, specs, PartitionSpec()), out_specs=(spec, specs), check_vma=check_vma
        )(gradient, state, params)

    def call(gradient: Any, state: Any, params: Any) -> Any:
        # Where it is already, unless a checkpoint or another number of workers had it on the host.
        state = jax.device_put(state, gc.state_shardings(state, mesh, axis_name=AXIS))
        return update(jax.tree.map(placed, gradient), state, jax.tree.map(replicated, params))

    return Environment(init, call, update, True)


def vmapped_init(tx: Any, params: Any, workers: int = WORKERS) -> Any:
    """The state of all workers, initialised inside the axis, in one program."""
    axes = gc.state_axes(jax.eval_shape(tx.init, params))
    return jax.jit(jax.vmap(tx.init, in_axes=None, out_axes=axes, axis_name=AXIS, axis_size=workers))(params)


def vmapped(tx: Any, params: Any, workers: int = WORKERS) -> tuple[Any, Any]:
    """The state of all workers, and ``update(gradients, state, params=None)``, compiled, with results stacked by worker."""
    state = vmapped_init(tx, params, workers)
    axes = gc.state_axes(state)
    update = jax.vmap(tx.update, in_axes=(0, axes, None), out_axes=(0, axes), axis_name=AXIS)
    return state, jax.jit(lambda gradients, state, params=None: update(gradients, state, params))


def _mapped(tx: Any, name: str, workers: int) -> Environment:
    def init(params: Any) -> Any:
        if name == "pmap":
            axes = gc.state_axes(jax.eval_shape(tx.init, params))
            # pmap needs a mapped argument; init has none but the parameters, which are replicated.
            return jax.pmap(lambda p, _: tx.init(p), AXIS, in_axes=(None, 0), out_axes=axes)(params, np.zeros(workers))
        return vmapped_init(tx, params, workers)

    @functools.cache
    def mapped(structure: Any, axes: Any) -> Any:
        tree = jax.tree.unflatten(structure, axes)
        arguments = {"in_axes": (0, tree, None), "out_axes": (0, tree), "axis_name": AXIS}
        if name == "pmap":
            return jax.pmap(tx.update, **arguments)
        return jax.jit(jax.vmap(tx.update, **arguments))

    def call(gradient: Any, state: Any, params: Any) -> Any:
        axes, structure = jax.tree.flatten(gc.state_axes(state), is_leaf=lambda x: x is None)
        return mapped(structure, tuple(axes))(gradient, state, params)

    return Environment(init, call, None, False)


def _once(init: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Remembers the state for the same parameters: every call would compile a program of its own."""
    known: dict[Any, Any] = {}

    def call(params: Any) -> Any:
        leaves, structure = jax.tree.flatten(params)
        if any(isinstance(leaf, jax.Array) for leaf in leaves):
            return init(params)
        key = (structure, *((a.shape, str(a.dtype), a.tobytes()) for a in map(np.asarray, leaves)))
        if key not in known:
            known[key] = init(params)
        return known[key]

    return call


def environment(name: str, tx: Any, workers: int = WORKERS) -> Environment:
    """The named environment around a transformation."""
    if name.startswith("shard_map"):
        kind = AxisType.Explicit if "explicit" in name else AxisType.Auto
        found = _shard_map(tx, kind, name.endswith("vma"), workers)
    else:
        found = _mapped(tx, name, workers)
    return dataclasses.replace(found, init=_once(found.init))


def by_worker(mark: gc.PerDevice, env: Environment) -> np.ndarray:
    """A per-device value as ``[workers, rows, ...]``."""
    value = np.asarray(mark.value)
    return value.reshape(WORKERS, -1, *value.shape[1:]) if env.rows_first else value


def exchange_state(state: Any) -> gc.ExchangeState:
    """The exchange's state inside a chain's; of a method with two exchanges the last one, with the steps of both."""
    found = [
        x
        for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, gc.ExchangeState))
        if isinstance(x, gc.ExchangeState)
    ]
    assert found
    if len(found) == 1:
        return found[0]
    step, skipped = (sum(np.asarray(getattr(s, name)) for s in found) for name in ("step", "skipped"))
    return found[-1]._replace(step=step, skipped=skipped)


def found_in(state: Any, kind: type) -> Any:
    """The one node of a type in a state."""
    found = [x for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind)) if isinstance(x, kind)]
    assert len(found) == 1
    return found[0]


def as_float32(tree: Any) -> Any:
    """NumPy float32 leaves."""
    return jax.tree.map(lambda a: np.asarray(a).astype(np.float32), tree)
