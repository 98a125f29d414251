"""Which axes of a mesh a collective runs along."""

import math
from typing import Any

import jax
import numpy as np

from gradcomp_jax.audit.groups import Groups, normalised


class MeshAxes:
    """Matches groups of devices against the axes of a mesh.

    A device of a compiled program is numbered by its position in the device assignment, which is its position
    in ``mesh.devices.flat``. A program over several TPU slices is compiled for one slice: its
    devices are those of the first slice, in the order of the mesh.

    Args:
        mesh: the mesh that the program was written for; of an abstract one devices are numbered in its order.
        device_count: devices of the program.

    Raises:
        ValueError: if the program does not run on the devices of the mesh.
    """

    def __init__(self, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, device_count: int):
        self.names: tuple[str, ...] = tuple(mesh.axis_names)
        described = isinstance(mesh, jax.sharding.AbstractMesh)
        self._shape = mesh.axis_sizes if described else np.shape(mesh.devices)
        self._positions = np.arange(math.prod(self._shape)).reshape(self._shape)
        flat: list[Any] = [None] * self._positions.size if described else list(np.asarray(mesh.devices).flat)
        self._by_id = {} if described else {device.id: position for position, device in enumerate(flat)}
        self._order = list(range(len(flat)))
        if len(flat) > device_count > 1:
            first = getattr(flat[0], "slice_index", None)
            slices = [getattr(device, "slice_index", None) for device in flat]
            self._order = [position for position, s in enumerate(slices) if s == first]
        # Before it is compiled, the text of a program does not say how many devices it is for.
        if device_count != 1 and len(self._order) != device_count:
            raise ValueError(
                f"mesh has {len(flat)} devices but the program runs on {device_count}: pass the "
                "mesh that the program was compiled for"
            )
        self._cache: dict[tuple[Groups, bool, bool], tuple[str, ...] | None] = {}

    def along(self, groups: Groups, *, hardware_ids: bool = False, fill: bool = True) -> tuple[str, ...] | None:
        """Returns the names of the axes that groups run along, in the order of the mesh.

        ``()`` for groups of one device, and None if no choice of axes gives these groups. ``hardware_ids``: the groups hold ids
        of devices, not device numbers. ``fill``: a group must hold every device along its axes; a permute may leave some out.
        """
        key = (groups, hardware_ids, fill)
        if key not in self._cache:
            self._cache[key] = self._match(*key)
        return self._cache[key]

    def _match(self, groups: Groups, hardware_ids: bool, fill: bool) -> tuple[str, ...] | None:
        try:
            placed = normalised(
                tuple(self._by_id[d] if hardware_ids else self._order[d] for d in group) for group in groups
            )
        except (KeyError, IndexError):
            return None
        if not placed:
            return None
        names = self._varying(placed)
        # A program for one slice of several holds only some of the groups.
        return names if not fill or set(placed) <= set(self._groups_along(names)) else None

    def _varying(self, groups: Groups) -> tuple[str, ...]:
        """Returns the axes along which the coordinates of some group differ."""
        varying: set[int] = set()
        for group in groups:
            coordinates = np.unravel_index(group, self._shape)
            varying |= {axis for axis, c in enumerate(coordinates) if np.ptp(c) > 0}
        return tuple(name for axis, name in enumerate(self.names) if axis in varying)

    def _groups_along(self, names: tuple[str, ...]) -> Groups:
        along = [axis for axis, name in enumerate(self.names) if name in names]
        rest = [axis for axis in range(len(self.names)) if axis not in along]
        size = int(np.prod([self._shape[axis] for axis in along], dtype=int))
        table = self._positions.transpose([*rest, *along]).reshape(-1, size)
        return normalised(tuple(int(p) for p in row) for row in table)


def mesh_of(compiled: Any) -> jax.sharding.Mesh | jax.sharding.AbstractMesh | None:
    """Returns the mesh that the arguments or the results of a compiled program lie on, or None if they do not say."""
    placed = (getattr(compiled, "input_shardings", None), getattr(compiled, "output_shardings", None))
    meshes = (leaf.mesh for leaf in jax.tree.leaves(placed) if isinstance(leaf, jax.sharding.NamedSharding))
    return next((mesh for mesh in meshes if mesh.size > 1), None)
