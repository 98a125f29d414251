"""Placeholders, with which ``optax.tree.map_params`` calls ``init`` to find what in a state is like the parameters."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from gradcomp_jax._typing import PyTree

Init = Callable[[PyTree], Any]


@functools.cache
def _kind() -> type:
    """Returns the type of the placeholder for all parameters, which is private to optax, but is passed to ``init``."""
    given: list[Any] = []

    def note(params: Any) -> tuple[()]:
        given.append(params)
        return ()

    optax.tree.map_params(note, lambda leaf: leaf, ())
    return type(given[0])


def is_placeholder(params: PyTree) -> bool:
    """Returns whether ``params`` is the placeholder that ``optax.tree.map_params`` passes to ``init``."""
    return isinstance(params, _kind())


class NotOfParams:
    """Remembers the structure of states that depends on the parameters, though no array has a parameter's shape.

    The number of memories in an exchange, and what they are, depend on the parameters, which a placeholder does not tell. If
    the transformation has seen parameters before, each array of the state is a separate leaf. If it has not, or has made
    states of several structures, the whole state is one leaf.
    """

    def __init__(self) -> None:
        """Starts without a structure."""
        self._seen: set[Any] = set()

    def seen(self, state: Any) -> Any:
        """Returns a state, and remembers its structure."""
        self._seen.add(jax.tree.structure(state))
        return state

    def leaves(self) -> Any:
        """Returns a tree that ``optax.tree.map_params`` finds no parameters in."""
        structures = list(self._seen)
        return jax.tree.unflatten(structures[0], [0] * structures[0].num_leaves) if len(structures) == 1 else 0


def not_of_params(init: Init) -> Init:
    """Makes an ``init`` accept a placeholder for parameters: no array of its state has their shapes."""
    remembered = NotOfParams()

    @functools.wraps(init)
    def wrapped(params: PyTree) -> Any:
        return remembered.leaves() if is_placeholder(params) else remembered.seen(init(params))

    return wrapped
