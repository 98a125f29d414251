"""Handles correct programs that JAX's tracking of what differs by worker refuses.

Inside ``jax.shard_map`` with ``check_vma=True`` a loop must end with the types that it began with, and all branches must return
the same types. A loop often starts from a constant, which does not differ by worker, and ends with a value that does. So flax's
recurrent layers, CTC, solvers of differential equations and many uses of ``lax.cond`` are refused, although they are correct.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from gradcomp_jax import _compat
from gradcomp_jax._specs import names_of
from gradcomp_jax._typing import AxisName

# JAX has a different sentence for each construct, and in a few places only a bare assertion.
_SAID = re.compile(r"manual ax(is|es)|invariant->variant|device-varying|\{V:")


def unless_refused(function: Callable[..., Any], axis_name: AxisName | None) -> Callable[..., Any]:
    """Returns a version of ``function`` that is traced again, without tracking, if tracking refuses it.

    The function must compute on each worker separately: without tracking its results count as differing by worker, and
    derivatives inside of it are the worker's own. If tracking accepts the function, it is traced once, to the same program.

    Args:
        function: a function of any arguments. Traced arrays among them are cast; all else is passed on unchanged.
        axis_name: the axis of the workers.
    """
    refused = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal refused
        if not _compat.tracks_varying(axis_name):
            return function(*args, **kwargs)
        if not refused:
            forget = _compat.traced_so_far()
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if not _is_refusal(error):
                    raise
                if _tracked_elsewhere(axis_name, (args, kwargs)):
                    raise TypeError(_explanation(axis_name, error)) from error
                # Otherwise what the function printed or sent before it was refused would be in the program twice.
                forget()
        # An error without tracking is an error of the function itself, and JAX explains it.
        result = _untracked(function, axis_name, args, kwargs)
        refused = True
        return result

    return call


@contextlib.contextmanager
def explained(axis_name: AxisName) -> Iterator[None]:
    """Says what to do if tracking refuses what cannot be traced without it, such as an optimizer."""
    try:
        yield
    except Exception as error:
        # Branches have another remedy: most are wrappers that choose between updates.
        if not _compat.tracks_varying(axis_name) or not _is_refusal(error) or isinstance(error, AssertionError):
            raise
        raise TypeError(_explanation(axis_name, error)) from error


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, AssertionError) or bool(_SAID.search(str(error)))


def _tracked_elsewhere(axis_name: AxisName | None, operands: Any) -> bool:
    """Returns whether some values differ along other axes than the workers', so that their derivatives need a sum."""
    own = set(names_of(axis_name)) if axis_name is not None else set()
    return any(_compat.varying_names(x) - own for x in jax.tree.leaves(operands) if _compat.is_traced(x))


def _untracked(function: Callable[..., Any], axis_name: AxisName | None, args: Any, kwargs: Any) -> Any:
    leaves, treedef = jax.tree.flatten((args, kwargs))
    numbers = [i for i, leaf in enumerate(leaves) if _compat.is_traced(leaf)]
    returned: list[Any] = []

    def inside(operands: list[Any]) -> list[Any]:
        given = list(leaves)
        for i, operand in zip(numbers, operands, strict=True):
            given[i] = operand
        found_args, found_kwargs = jax.tree.unflatten(treedef, given)
        result = function(*found_args, **found_kwargs)
        returned[:] = [result]
        return [leaf for leaf in jax.tree.leaves(result) if _compat.is_traced(leaf)]

    operands = [_compat.invarying(leaves[i], axis_name) for i in numbers]
    try:
        with _compat.untracked():
            # Jitted, so that the program has its own types.
            arrays = iter(jax.jit(inside)(operands))
    except Exception as error:
        if not _SAID.search(str(error)):
            raise
        raise TypeError(_explanation(axis_name, error)) from error

    def out(leaf: Any) -> Any:
        leaf = next(arrays) if _compat.is_traced(leaf) else leaf
        return _compat.varying(leaf, axis_name) if isinstance(leaf, (jax.Array, np.ndarray)) else leaf

    return jax.tree.map(out, returned[0])


def _explanation(axis_name: AxisName | None, error: Exception) -> str:
    return (
        f"JAX tracks which values differ by worker over {axis_name!r}, and a loop or a branch here begins with a constant and"
        " ends with such a value. Nothing need be wrong with it: give check_vma=False to make_train_step, make_overlapped_step,"
        " make_overlapped_outer_step or unreduced, or to the jax.shard_map around it; then nothing checks that what should be"
        f" equal on all workers is. Or cast the constant: jax.lax.pcast(x, {axis_name!r}, to='varying'). A loss takes what"
        f" it closes over as an argument instead. JAX says: {error}"
    )
