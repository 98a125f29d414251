"""Parameters that lie in all processes of an island: as arrays of a host, and from there back to where they were."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gradcomp_jax._errors import SettingError
from gradcomp_jax._typing import PyTree


class Whole:
    """Stands for a parameter, and gathers it from all processes when NumPy reads it: one at a time, as they are read."""

    def __init__(self, leaf: Any) -> None:
        """Takes a parameter."""
        self.leaf, self.shape = leaf, np.shape(leaf)

    @property
    def has_parts(self) -> bool:
        """Returns whether this process has a part of it, and others have the rest."""
        if not isinstance(self.leaf, jax.Array) or self.leaf.is_fully_addressable or self.leaf.is_fully_replicated:
            return False
        return bool(self.leaf.addressable_shards)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns the parameter. If there are parts of it, all processes call this together."""
        whole = multihost_utils.process_allgather(self.leaf, tiled=True) if self.has_parts else self.leaf
        return np.asarray(whole, dtype)


def refuse_elsewhere(params: PyTree) -> None:
    """Refuses parameters that this process cannot gather from all others.

    Raises:
        SettingError: if there is one that lies in some processes only.
    """
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            devices: set[Any] = leaf.sharding.device_set
            if len({device.process_index for device in devices}) < jax.process_count():
                raise SettingError(
                    "a parameter lies in some processes of this island and not in others, which cannot gather it: place it"
                    " on a mesh of all devices"
                )


def placed(new: Any, old: Any) -> jax.Array:
    """Returns an array of the host where an old parameter is, in its dtype; every process has all of the new one."""
    # A copy: an array of JAX may share the host's memory, and be donated.
    new = np.array(new, old.dtype)
    if not isinstance(old, jax.Array):
        return jax.device_put(new)
    if old.is_fully_addressable:
        return jax.device_put(new, old.sharding)
    return jax.make_array_from_callback(old.shape, old.sharding, lambda part: np.array(new[part]), dtype=old.dtype)
