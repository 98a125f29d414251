"""Runs something in some steps only, inside one program."""

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from gradcomp_jax import _compat
from gradcomp_jax._typing import Array


def when(predicate: Array | bool, do: Callable[..., Any], otherwise: Any, *operands: Any) -> Any:
    """Returns ``do(*operands)`` where the predicate holds, else ``otherwise``.

    The predicate is a boolean scalar, equal on every worker, so ``do`` may communicate. ``True`` itself costs no branch.
    ``otherwise`` has the structure that ``do`` returns; ``None`` instead of a part stands for zeros.
    """
    if predicate is True:
        return do(*operands)
    zeros = _compat.zeros_of(do, *operands)
    default = type(zeros)(z if o is None else o for z, o in zip(zeros, otherwise, strict=True))
    return lax.cond(predicate, lambda *xs: do(*xs), lambda *_: default, *operands)


def advance(predicate: Array | bool, do: Callable[..., Any], carried: tuple, *given: Any) -> tuple:
    """Returns ``do(*carried, *given)`` where the predicate holds, else ``carried``, and copies nothing.

    It is a loop of at most one iteration: a compiler changes in place what a loop carries, and copies what goes through a
    branch. ``do`` may communicate what depends on all of ``carried``. A compiler may compute what depends on ``given`` alone in
    every step. ``do`` returns a tuple of the shapes and dtypes of ``carried``. The predicate is as for :func:`when`.
    """
    if predicate is True:
        return do(*carried, *given)

    def turn(carry: tuple[Any, tuple]) -> tuple[Any, tuple]:
        return False, do(*carry[1], *given)

    return lax.while_loop(lambda carry: carry[0], turn, (predicate, carried))[1]


def each_nth(step: Array, every: int, offset: int = 0) -> Array | bool:
    """Returns whether ``every`` divides the number of a step, counted from 1, plus an offset; ``True`` itself for 1."""
    return True if every == 1 else (step + 1 + offset) % every == 0


def one_of(number: Array, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Returns the result of the branch with that number; a single branch puts no branching into the program."""
    return branches[0](*operands) if len(branches) == 1 else lax.switch(number, branches, *operands)
