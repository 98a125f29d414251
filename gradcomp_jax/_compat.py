"""The only file that looks at how a JAX release tracks mapped axes.

Everything that differs between ``shard_map`` (with and without varying-ness tracking), ``pmap``,
``vmap`` and no axis at all is decided here, so that the rest of the library has one code path.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array, AxisName, PyTree


def _names(axis_name: AxisName) -> tuple[Any, ...]:
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def axis_size(axis_name: AxisName | None) -> int | None:
    """Returns the number of workers on an axis; 1 for no axis, ``None`` where it is not bound."""
    if axis_name is None:
        return 1
    try:
        return int(lax.axis_size(axis_name))
    except NameError:
        return None


def axis_index(axis_name: AxisName | None) -> Array:
    """Returns this worker's index (int32) on the axis; 0 for no axis."""
    if axis_name is None:
        return jnp.zeros((), jnp.int32)
    return lax.axis_index(axis_name)


def _varying_names(x: Array) -> frozenset[Any]:
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    found = manual.varying if manual is not None else getattr(aval, "vma", frozenset())
    return frozenset(found)


def tracks_varying(axis_name: AxisName | None) -> bool:
    """Whether the surrounding trace records which values differ along the axis.

    True inside ``jax.shard_map`` with ``check_vma=True``; false under ``check_vma=False``, ``pmap``,
    ``vmap``, where the axis is not bound, and for no axis.
    """
    if axis_name is None or axis_size(axis_name) is None:
        return False
    return bool(_varying_names(axis_index(axis_name)))


def is_varying(x: Array, axis_name: AxisName) -> bool:
    """Whether ``x`` is recorded to differ along every name of the axis."""
    return set(_names(axis_name)) <= _varying_names(x)


def varying(tree: PyTree, axis_name: AxisName | None) -> PyTree:
    """Marks every leaf as differing along the axis, where that is tracked; otherwise a no-op."""
    if not tracks_varying(axis_name):
        return tree

    def cast(x: Array) -> Array:
        missing = tuple(n for n in _names(axis_name) if n not in _varying_names(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def all_gather(x: Array, axis_name: AxisName | None) -> Array:
    """Stacks every worker's ``x`` on a new leading axis; the result is known to be replicated."""
    if axis_name is None:
        return x[None]
    if tracks_varying(axis_name):
        return lax.all_gather(varying(x, axis_name), axis_name, to="invarying")
    return lax.all_gather(x, axis_name)
