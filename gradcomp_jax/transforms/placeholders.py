"""What ``optax.tree.map_params`` asks of ``init``: a state for parameters that are not there, to tell what is theirs in it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from gradcomp_jax._typing import PyTree

Init = Callable[[PyTree], Any]


@functools.cache
def _kind() -> type:
    """The type of what stands for all parameters, which optax keeps to itself, and gives to whoever is asked."""
    given: list[Any] = []

    def note(params: Any) -> tuple[()]:
        given.append(params)
        return ()

    optax.tree.map_params(note, lambda leaf: leaf, ())
    return type(given[0])


def is_placeholder(params: PyTree) -> bool:
    """Returns whether ``init`` is asked by ``optax.tree.map_params`` what of a state is like the parameters."""
    return isinstance(params, _kind())


class NotOfParams:
    """Remembers the structure of states none of which is of a parameter's shape, though it follows from the parameters.

    How many memories an exchange has, and what they are, depends on the parameters, which a placeholder does not tell. The
    transformation may have seen them before: then each array of the state is a leaf of its own. Where it has not, or has made
    states of several structures, the state is one leaf as a whole.
    """

    def __init__(self) -> None:
        """Has seen no structure."""
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
    """Makes an ``init`` answer for parameters that are not there: nothing of its state is of their shapes."""
    remembered = NotOfParams()

    @functools.wraps(init)
    def wrapped(params: PyTree) -> Any:
        return remembered.leaves() if is_placeholder(params) else remembered.seen(init(params))

    return wrapped
