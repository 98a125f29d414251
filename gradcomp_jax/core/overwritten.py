"""What Flax overwrites with its gradient, without an optimizer: the scales of fp8 and the histories they come from.

It is a separate collection beside the parameters, as ``model.init`` returns both. A rule of differentiation returns its new
values instead of gradients.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import PyTree

COLLECTION = "_overwrite_with_gradient"
"""The collection's name in Flax."""

_PARAMS = "params"


def has_overwritten(tree: PyTree) -> bool:
    """Returns whether a tree is a mapping of parameters, or of their gradients, with the collection beside them."""
    return isinstance(tree, Mapping) and COLLECTION in tree and _PARAMS in tree


def is_overwritten(path: tuple) -> bool:
    """Returns whether a leaf of this path is in the collection, at any depth of the tree."""
    return COLLECTION in path_name(path).split("/")


def trained(tree: PyTree) -> PyTree:
    """Returns the part of parameters, or of their gradients, specs or shapes, that an optimizer updates."""
    return tree[_PARAMS] if has_overwritten(tree) else tree


def joined(like: PyTree, moved: PyTree, overwritten: PyTree) -> PyTree:
    """Inverts :func:`trained`.

    Args:
        like: a tree of the wanted structure.
        moved: what :func:`trained` returns of the result.
        overwritten: a tree such as ``like``, with the collection's new values.
    """
    if not has_overwritten(like):
        return moved
    found, treedef = jax.tree_util.tree_flatten_with_path(like, is_leaf=lambda node: node is not like)
    values = {_PARAMS: moved, COLLECTION: overwritten[COLLECTION]}
    # A mapping such as flax's FrozenDict returns values of another type than it holds.
    parts = [
        jax.tree.unflatten(jax.tree.structure(part), jax.tree.leaves(values[path_name(path)])) for path, part in found
    ]
    return jax.tree.unflatten(treedef, parts)


def trained_order(names: Sequence[str], params: PyTree) -> tuple[str, ...]:
    """Returns the paths of the parameters that are trained, as :func:`trained` names them."""
    if not has_overwritten(params):
        return tuple(names)
    begin = f"{_PARAMS}/"
    return tuple(name.removeprefix(begin) for name in names if name.startswith(begin))


def refuse_misplaced(params: PyTree) -> None:
    """Refuses parameters if it is not clear which of them are trained.

    Raises:
        ValueError: if the collection lies within something else, or beside anything but ``"params"``.
    """
    named = jax.tree_util.tree_leaves_with_path(params)
    has = has_overwritten(params)
    wrong = [path for path, _ in named if is_overwritten(path[1:] if has else path)]
    wrong += [path for path, _ in named if has and path_name(path[:1]) not in (_PARAMS, COLLECTION)]
    if wrong:
        raise ValueError(
            f"{path_name(wrong[0])!r}: with Flax's collection {COLLECTION!r} parameters are"
            f" {{'{_PARAMS}': ..., '{COLLECTION}': ...}}, both at the top and nothing beside them; what else a model changes,"
            " such as batch_stats, is model_state="
        )


def refuse_own_dtype(params: PyTree) -> None:
    """Refuses parameters of the collection that have one of Flax's own dtypes.

    Raises:
        TypeError: naming the first such leaf.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not is_overwritten(path):
            continue
        kind = jnp.result_type(leaf)
        # Keys have an extended dtype too, and are accepted.
        if jnp.issubdtype(kind, jax.dtypes.extended) and not jnp.issubdtype(kind, jax.dtypes.prng_key):
            raise TypeError(
                f"{path_name(path)!r} is {kind}, which no program returns: keep it as float32, and in the loss"
                " take jax.lax.convert_element_type(x, flax.linen.fp8_ops.fm32)"
            )


def refuse_overwritten(tree: Any) -> None:
    """Refuses the collection where parameters or gradients are exchanged: its new values have no mean.

    Raises:
        ValueError: naming its first leaf.
    """
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        if is_overwritten(path):
            raise ValueError(
                f"{path_name(path)!r} is of Flax's collection {COLLECTION!r}, whose gradients are its new values, and an"
                f" optimizer would train it. Give init and update what is beside it, params[{_PARAMS!r}] and"
                f" gradients[{_PARAMS!r}], as flax's TrainState does, and overwrite it with gradients[{COLLECTION!r}], in which"
                " gradcomp_jax.local_value_and_grad returns the maximum over the workers. gradcomp_jax.init_state and"
                " make_train_step take both together and do so"
            )
