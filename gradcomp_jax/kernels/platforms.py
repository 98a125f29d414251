"""Code that differs by platform: the choice is made when a program is lowered, and only the chosen branch is in it."""

from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from gradcomp_jax._typing import Array, PyTree

_LARGE = 2**16
"""Entries from which an array's temporaries matter."""


def on_cpu(cpu: Callable[..., Any], accelerator: Callable[..., Any], *operands: Any) -> Any:
    """Returns ``cpu(*operands)`` in a program for CPU, and ``accelerator(*operands)``, the same numbers, in every other."""
    return lax.platform_dependent(*operands, cpu=cpu, default=accelerator)


def held_on_cpu(tree: PyTree) -> PyTree:
    """Returns arrays that XLA's CPU backend holds in memory; the other backends compute them where they are used."""
    return on_cpu(lax.optimization_barrier, lambda x: x, tree)


def held_on_tpu(array: Array) -> Array:
    """Returns an array that TPU holds in memory: otherwise TPU would change the layout of each of its sources."""
    return lax.platform_dependent(array, tpu=lax.optimization_barrier, default=lambda x: x)


def in_rows(array: Array) -> Array:
    """Returns a matrix that compilers lay out row after row, whatever would be easier for them."""
    return with_layout_constraint(array, Layout(major_to_minor=tuple(range(array.ndim))))


def in_rows_on_tpu(array: Array) -> Array:
    """Returns a matrix that TPU holds in memory row after row.

    Otherwise TPU makes it by columns where that is easier, and transposes what is computed from it, which may be wider.
    """
    return lax.platform_dependent(array, tpu=in_rows, default=lambda x: x)


def follows_on_tpu(ok: Array, array: Array) -> Array:
    """Returns ``ok``; in a program for TPU only once an array is there, so that whatever waits for ``ok`` comes after it.

    TPU's compiler would handle tensors side by side, each with its own temporaries; the other backends handle one at a time.
    Small arrays are not waited for.
    """
    if array.size < _LARGE:
        return ok
    first = array.reshape(-1)[0]
    ok = ok & ((first == first) | True)  # so that it varies over the axis if the array does, on every backend
    return lax.platform_dependent(
        ok, array, tpu=lambda ok, array: lax.optimization_barrier((ok, array))[0], default=lambda ok, array: ok
    )
