"""Places restored state as the target state lies, with leaves of the same kind."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp_jax import _compat
from gradcomp_jax._checks import is_typed_key
from gradcomp_jax._typing import PyTree


def targets(like: PyTree) -> PyTree:
    """Returns what Orbax is told to restore: shapes, dtypes and shardings; arrays instead of NumPy's scalars."""
    import orbax.checkpoint as ocp

    return jax.tree.map(
        lambda leaf: ocp.utils.to_shape_dtype_struct(np.asarray(leaf) if isinstance(leaf, np.generic) else leaf), like
    )


def as_they_were(restored: PyTree, like: PyTree) -> PyTree:
    """Returns a restored state whose leaves are bound to devices only where those of ``like`` are, and of the same kinds.

    A fresh array of ``model.init``, ``jax.numpy`` or ``jax.random.key`` moves to the devices of any program. An array that was
    restored to the same device is bound to it, and a program over a mesh refuses it.
    """
    return jax.tree.map(_as_it_was, restored, like)


def has_plain_numbers(saved: PyTree, like: PyTree) -> bool:
    """Returns whether a saved Python number is an array of 32 bits or fewer in ``like``."""
    return any(map(_is_plain_number, jax.tree.leaves(saved), jax.tree.leaves(like)))


def typed(value: Any, target: Any) -> Any:
    """Returns saved data in the type of the target: as typed keys, or a Python number in the dtype of an array.

    A whole number that the dtype does not hold is returned unchanged.
    """
    if not is_typed_key(target):
        if _is_plain_number(value, target):
            with np.errstate(over="ignore"):
                narrow = np.asarray(value).astype(target.dtype)
            return value if narrow.dtype.kind in "iu" and narrow != value else narrow
        return value
    return jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(target))


def placed(value: Any, target: Any) -> Any:
    """Places a value that all processes have where the target lies, each device with its part."""
    if not isinstance(target, jax.Array):
        return _plain(value, target)
    if _compat.is_uncommitted(target):
        return _as_it_was(value, target)
    if is_typed_key(target):
        return jax.device_put(value, target.sharding)
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, target.sharding, lambda index: value[index])


def _as_it_was(value: Any, target: Any) -> Any:
    if not isinstance(target, jax.Array):
        return _plain(value, target)
    if not _compat.is_uncommitted(target):
        return value
    with jax.default_device(next(iter(target.devices()))):
        if is_typed_key(target):
            data = np.asarray(jax.random.key_data(value) if is_typed_key(value) else value)
            return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(target))
        host = np.asarray(value)
        if target.weak_type and not host.ndim and (weak := jnp.asarray(host.item())).dtype == host.dtype:
            # A weak type, as of jnp.asarray(1.0), widens no other array.
            return weak
        return jnp.asarray(host)


def _is_plain_number(saved: Any, target: Any) -> bool:
    if is_typed_key(target) or not hasattr(target, "dtype") or saved.shape != () or target.shape != ():
        return False
    kind = {np.dtype(np.int64): jnp.integer, np.dtype(np.float64): jnp.floating}.get(np.dtype(saved.dtype))
    return kind is not None and saved.dtype != target.dtype and jnp.issubdtype(target.dtype, kind)


def _plain(value: Any, target: Any) -> Any:
    if isinstance(target, (bool, int, float)) and not isinstance(target, np.generic):
        return type(target)(value)
    if isinstance(target, np.generic):
        return np.asarray(value, target.dtype)[()]
    return np.asarray(value) if isinstance(target, np.ndarray) else value
