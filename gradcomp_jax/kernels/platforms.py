"""What the compilers want shaped differently: the choice is made when a program is lowered, and no other branch is in it."""

from collections.abc import Callable
from typing import Any

from jax import lax

from gradcomp_jax._typing import PyTree


def on_cpu(cpu: Callable[..., Any], accelerator: Callable[..., Any], *operands: Any) -> Any:
    """Returns ``cpu(*operands)`` in a program for CPU, ``accelerator(*operands)``, the same numbers, in every other one."""
    return lax.platform_dependent(*operands, cpu=cpu, default=accelerator)


def held_on_cpu(tree: PyTree) -> PyTree:
    """Returns arrays that XLA's CPU backend is to hold in memory; the other backends compute them where they are used."""
    return on_cpu(lax.optimization_barrier, lambda x: x, tree)
