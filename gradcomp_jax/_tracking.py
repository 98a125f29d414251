"""Where JAX's tracking of what differs by worker stops a program that is right.

Inside ``jax.shard_map`` with ``check_vma=True`` a loop must end with the types that it began with, and a branch return those of
the others. A constant does not differ by worker and what it becomes does, so flax's recurrent layers, CTC, solvers of
differential equations and many a ``lax.cond`` are refused, though nothing is wrong with them.
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

# JAX says it in a sentence for each construct, and in a few places by a bare assertion.
_SAID = re.compile(r"manual ax(is|es)|invariant->variant|device-varying|\{V:")


def unless_refused(function: Callable[..., Any], axis_name: AxisName | None) -> Callable[..., Any]:
    """Returns ``function``, which is traced once more, without tracking, where tracking refuses it.

    It must compute on each worker by itself: what it returns counts as differing by worker then, and derivatives inside of it
    are the worker's own. A function that tracking does not refuse is traced once, and its program is the same.

    Args:
        function: of any arguments. Traced arrays among them are cast; all else is passed on as it is.
        axis_name: the axis of the workers.

    Raises:
        TypeError: when traced, if it is refused where values are tracked along other axes too, or a traced array that it has
            not been given as an argument is what stops it.
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
                # What it has printed or sent before it was refused would be there twice.
                forget()
        # Without tracking: what is wrong now is wrong with the function itself, and JAX says what.
        result = _untracked(function, axis_name, args, kwargs)
        refused = True
        return result

    return call


@contextlib.contextmanager
def explained(axis_name: AxisName) -> Iterator[None]:
    """Says what to do where tracking refuses what cannot go without it, such as an optimizer.

    Raises:
        TypeError: in the place of JAX's own error.
    """
    try:
        yield
    except Exception as error:
        # Branches have a remedy of their own: most are wrappers that choose between updates.
        if not _compat.tracks_varying(axis_name) or not _is_refusal(error) or isinstance(error, AssertionError):
            raise
        raise TypeError(_explanation(axis_name, error)) from error


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, AssertionError) or bool(_SAID.search(str(error)))


def _tracked_elsewhere(axis_name: AxisName | None, operands: Any) -> bool:
    """Whether some values differ along axes that are not the workers': their derivatives would have to be added up."""
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
            # Jitted, so that the program has types of its own.
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
