"""What the compilers want shaped differently: the choice is made when a program is lowered, and no other branch is in it."""

from collections.abc import Callable
from typing import Any

from jax import lax

from gradcomp_jax._typing import Array, PyTree

_LARGE = 2**16
"""Entries of an array whose temporaries count."""


def on_cpu(cpu: Callable[..., Any], accelerator: Callable[..., Any], *operands: Any) -> Any:
    """Returns ``cpu(*operands)`` in a program for CPU, ``accelerator(*operands)``, the same numbers, in every other one."""
    return lax.platform_dependent(*operands, cpu=cpu, default=accelerator)


def held_on_cpu(tree: PyTree) -> PyTree:
    """Returns arrays that XLA's CPU backend is to hold in memory; the other backends compute them where they are used."""
    return on_cpu(lax.optimization_barrier, lambda x: x, tree)


def held_on_tpu(array: Array) -> Array:
    """Returns an array that TPU is to hold in memory: it would lay out anew each of the arrays that it is made of."""
    return lax.platform_dependent(array, tpu=lax.optimization_barrier, default=lambda x: x)


def follows_on_tpu(ok: Array, array: Array) -> Array:
    """Returns ``ok``, in a program for TPU only once an array is there: what waits for ``ok`` comes after it.

    TPU's compiler would take tensors side by side, each with temporaries of its own; the other backends take one at a time.
    Small ones are not waited for.
    """
    if array.size < _LARGE:
        return ok
    first = array.reshape(-1)[0]
    ok = ok & ((first == first) | True)  # as varying over the axis as the array, on every backend
    return lax.platform_dependent(
        ok, array, tpu=lambda ok, array: lax.optimization_barrier((ok, array))[0], default=lambda ok, array: ok
    )
