"""Calls as single programs: of a function called by itself, jax compiles every operation alone, for each shape."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gradcomp_jax import kernels as _kernels


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one program for each call: arrays are its arguments, all else is fixed."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, options))
        varies = tuple(isinstance(x, jax.Array | np.ndarray) for x in leaves)
        if not any(varies):
            return function(*args, **options)
        # With its type: 1, 1.0 and True are equal.
        fixed = tuple(None if v else (type(x), x) for x, v in zip(leaves, varies, strict=True))
        return _program(function, structure, fixed)(*(x for x, v in zip(leaves, varies, strict=True) if v))

    return call


@functools.cache
def _program(function: Callable[..., Any], structure: Any, fixed: tuple[Any, ...]) -> Any:
    def run(*arrays: Any) -> Any:
        rest = iter(arrays)
        args, options = jax.tree.unflatten(structure, [next(rest) if f is None else f[1] for f in fixed])
        return function(*args, **options)

    return jax.jit(run)


class _Kernels:
    """``gradcomp_jax.kernels`` with every call compiled."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(_kernels, name)
        return compiled(value) if inspect.isfunction(value) else value


kernels = _Kernels()
