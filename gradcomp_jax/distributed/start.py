"""Refuses workers that do not start equal, on all devices of all processes, in one call before the first step."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from gradcomp_jax import _arguments, _specs, per_device
from gradcomp_jax._errors import SettingError, numbered
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.distributed import digests
from gradcomp_jax.distributed.agreement import check_equal

_REMEDY = (
    "make them the same in every process, by the seed or from one file, and place them with"
    " gradcomp_jax.init_state(params, ...); a worker that joins takes the state of another"
)


@_arguments.checked
def check_equal_start(
    state: PyTree, mesh: Mesh, *, axis_name: AxisName = "data", param_specs: PyTree | None = None
) -> None:
    """Compares the state that all workers must start with, and raises in all processes if two workers differ.

    All processes call this together, before the first step.

    Paths, shapes and dtypes are compared first, through the coordination service of ``jax.distributed``. Then one program
    reads every array once, where it lies, and the workers see each other's digests (:func:`gradcomp_jax.distributed.digest`):
    four bytes for each array and worker. Within one process this finds devices whose copies differ.

    Example:
        >>> state = gc.init_state(params, optax.sgd(0.1), mesh)
        >>> gc.check_equal_start(state.params, mesh)  # raises where two devices differ

    Args:
        state: parameters, or a whole state. Replicas (``gc.init_state(..., replicas=True)``) start equal, too. Per-device state
            of an exchange differs by worker and is left out, and so are arrays that lie along the axis of the workers.
        mesh: the mesh of the workers.
        axis_name: their axis.
        param_specs: the specs of parameters that lie along other axes of the mesh; ``state`` then has the same structure. Other
            parameters are compared whole.

    Raises:
        SettingError: in every process, naming the first array that differs, and the workers.
        ClusterError: if a process does not come in time.
        ValueError: if the mesh has no such axis.
    """
    names = _specs.names_of(axis_name)
    if missing := [name for name in names if name not in mesh.axis_names]:
        raise ValueError(f"axis_name must be of the mesh's axes {mesh.axis_names}, got {missing[0]!r}")
    paths, leaves, specs = _compared(state, names, axis_name, param_specs)
    told = {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in zip(paths, leaves, strict=True)}
    check_equal({"the workers' axis": [mesh.shape[name] for name in names], **told}, remedy=_REMEDY)
    if not leaves:
        return

    def each(leaves: Sequence[Array]) -> Array:
        every = lax.all_gather(jnp.stack([digests.number(leaf) for leaf in leaves]), axis_name)
        apart = (every != every[:1]).astype(jnp.int32)
        rest = tuple(name for name in mesh.axis_names if name not in names)
        return lax.pmax(apart, rest) if rest else apart

    # Unchecked, because copies that differ are what this looks for.
    mapped = jax.shard_map(each, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False)
    apart = np.asarray(jax.jit(mapped)(leaves).addressable_data(0)).astype(bool)
    if apart.any():
        first = int(apart.any(axis=0).argmax())
        workers, more = np.flatnonzero(apart[:, first]).tolist(), int(apart.any(axis=0).sum()) - 1
        where = numbered(workers, "worker", "workers")
        raise SettingError(
            f"the workers do not start equal: {paths[first]} is not on {where} what it is on worker 0"
            f"{f', and so are {more} more arrays' if more else ''}: {_REMEDY}"
        )


def _compared(
    state: PyTree, names: tuple[Any, ...], axis_name: AxisName, param_specs: PyTree | None
) -> tuple[list[str], list[Any], list[P]]:
    """Returns paths, arrays and specs of what must be equal on all workers."""
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=per_device.is_per_device)
    given = [P()] * len(nodes) if param_specs is None else _specs.by_leaf(param_specs, state)
    paths, leaves, specs = [], [], []
    for (path, node), spec in zip(nodes, given, strict=True):
        if per_device.is_per_device(node):
            if not node.lifted:
                continue
            node, spec = node.value, P(axis_name)
        elif any(name in names for entry in spec for name in _specs.names_of(entry)):
            continue
        paths.append(jax.tree_util.keystr(path) or "the array")
        leaves.append(node if isinstance(node, jax.Array) else np.asarray(node))
        specs.append(spec)
    return paths, leaves, specs
