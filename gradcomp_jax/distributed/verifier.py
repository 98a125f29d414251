"""Compares copies of parameters that must be equal, on all devices of all processes, during training."""

import functools
import hashlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from gradcomp_jax._errors import SettingError
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.distributed import digests
from gradcomp_jax.distributed.agreement import compare

_APART = " on device "


class Verifier:
    """Compares the copies of replicated parameters, and names the first step after which they differ.

    After each step, a program without communication reads the parameters once and keeps four bytes for every leaf and device.
    Every ``every`` steps, and when :meth:`check` is called, the processes compare these bytes through the coordination service,
    which moves a few bytes for each step. All processes call the same methods in the same order.
    """

    def __init__(self, mesh: Mesh, every: int, *, timeout: float = 300) -> None:
        """Prepares a comparison.

        Args:
          mesh: the mesh that the parameters are replicated over.
          every: steps from one comparison to the next; 0 for no comparisons.
          timeout: seconds to wait for the other processes.
        """
        self._every = every
        self._timeout = timeout
        self._kept: list[tuple[int, Array]] = []
        self._paths: list[str] = []

        def each(tree: PyTree) -> Array:
            numbers = [digests.number(leaf) for leaf in jax.tree.leaves(tree)]
            return jnp.stack(numbers)[None] if numbers else jnp.zeros((1, 0), jnp.uint32)

        # Unchecked, because copies that differ are what this looks for.
        mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), check_vma=False)
        self._digests = jax.jit(mapped(each, out_specs=P(tuple(mesh.axis_names))))

    def after_step(self, step: int, params: PyTree) -> None:
        """Records the parameters after a step, and compares if it is time to.

        Args:
          step: number of the step, from 1.
          params: arrays that are replicated over the mesh.

        Raises:
          SettingError: in every process, if copies differ.
          ClusterError: if a process does not come in time.
        """
        if not self._every:
            return
        if not self._paths:
            self._paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        self._kept.append((step, self._digests(params)))
        if step % self._every == 0:
            self.check()

    def check(self) -> None:
        """Compares what has not been compared yet.

        Raises:
          SettingError: in every process, if copies differ.
          ClusterError: if a process does not come in time.
        """
        if not self._kept:
            return
        # Digests of this process's devices, by step and the device's id: uint32 ``[leaves]`` each.
        rows = {
            str(step): {shard.device.id: np.asarray(shard.data).reshape(-1) for shard in found.addressable_shards}
            for step, found in self._kept
        }
        self._kept.clear()
        first, _ = self._compared(
            {step: _by_device({d: _one(row) for d, row in on.items()}) for step, on in rows.items()}
        )
        if first is None:
            return
        on = rows[first]
        leaves = {
            path: _by_device({device: f"{int(row[leaf]):08x}" for device, row in on.items()})
            for leaf, path in enumerate(self._paths)
        }
        _, words = self._compared(leaves)
        raise SettingError(
            f"the parameters differ from step {first} on: {words}: a device may be faulty, or the processes run different "
            "programs; the run can go on from what was saved before this step"
        )

    def _compared(self, values: Mapping[str, str]) -> tuple[str | None, str]:
        """Returns the first name that differs, between processes or between this one's devices, and all differences."""
        first, words = compare(values, timeout=self._timeout)
        if first is not None:
            return first, words
        apart = [name for name, value in values.items() if _APART in value]
        return (apart[0], f"{apart[0]} is {values[apart[0]]}") if apart else (None, "")


def _one(row: np.ndarray) -> str:
    return hashlib.sha256(row.tobytes()).hexdigest()[:8]


def _by_device(values: Mapping[int, str]) -> str:
    """Returns the value that all devices have, or each value with the first device that has it."""
    first: dict[str, int] = {}
    for device, value in values.items():
        first.setdefault(value, device)
    if len(first) == 1:
        return next(iter(first))
    return " and ".join(f"{value}{_APART}{device}" for value, device in first.items())
