"""Where a batch lives on a mesh."""

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gradcomp_jax._typing import AxisName
from gradcomp_jax.training.state import check_axis


def data_sharding(mesh: Mesh, *, axis_name: AxisName = "data") -> NamedSharding:
    """Returns the sharding of a batch whose leading dimension is split over the workers, for ``jax.device_put``.

    Args:
        mesh: with the axis among its names.
        axis_name: the axis of the workers.

    Raises:
        ValueError: if the mesh has no such axis.
    """
    check_axis(mesh, axis_name)
    return NamedSharding(mesh, PartitionSpec(axis_name))
