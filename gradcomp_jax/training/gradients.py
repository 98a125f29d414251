"""Gradients that are still each worker's own."""

from collections.abc import Callable
from typing import Any

import jax

from gradcomp_jax import _compat
from gradcomp_jax._typing import AxisName


def local_value_and_grad(
    loss: Callable[..., Any], *, axis_name: AxisName | None, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Returns what ``jax.value_and_grad`` does, for the gradient of this worker's loss alone.

    Inside ``jax.shard_map`` with ``check_vma=True``, ``jax.grad`` with respect to replicated parameters already sums
    over the axis, in a dense all-reduce. This casts the parameters to per-device values first; elsewhere it changes
    nothing.

    Args:
        loss: ``loss(params, *args) -> scalar``, or ``(scalar, aux)`` with ``has_aux``.
        axis_name: the axis that the workers lie along.
        has_aux: whether ``loss`` returns auxiliary output.

    Returns:
        A function with the arguments of ``loss`` that returns ``(value, gradient)``.
    """

    def value_and_grad(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        local = _compat.varying(params, axis_name)
        return jax.value_and_grad(loss, has_aux=has_aux)(local, *args, **kwargs)

    return value_and_grad
