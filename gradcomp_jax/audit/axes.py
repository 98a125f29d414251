"""Which axes of a mesh a collective runs along."""

import jax
import numpy as np

from gradcomp_jax.audit.groups import Groups, normalised


class MeshAxes:
    """Matches groups of devices against the axes of a mesh.

    A device of a compiled program is numbered by its position in the device assignment, which is its position
    in ``mesh.devices.flat``. A program over several TPU slices is compiled for one slice: its
    devices are those of the first slice, in the order of the mesh.

    Args:
        mesh: the mesh that the program was written for.
        device_count: devices of the program.

    Raises:
        ValueError: if the program does not run on the devices of the mesh.
    """

    def __init__(self, mesh: jax.sharding.Mesh, device_count: int):
        self._names = tuple(mesh.axis_names)
        self._devices = np.asarray(mesh.devices)
        self._positions = np.arange(self._devices.size).reshape(self._devices.shape)
        flat = list(self._devices.flat)
        self._by_id = {device.id: position for position, device in enumerate(flat)}
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
            coordinates = np.unravel_index(group, self._devices.shape)
            varying |= {axis for axis, c in enumerate(coordinates) if np.ptp(c) > 0}
        return tuple(name for axis, name in enumerate(self._names) if axis in varying)

    def _groups_along(self, names: tuple[str, ...]) -> Groups:
        along = [axis for axis, name in enumerate(self._names) if name in names]
        rest = [axis for axis in range(len(self._names)) if axis not in along]
        size = int(np.prod([self._devices.shape[axis] for axis in along], dtype=int))
        table = self._positions.transpose([*rest, *along]).reshape(-1, size)
        return normalised(tuple(int(p) for p in row) for row in table)
