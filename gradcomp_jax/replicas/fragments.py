"""Chooses which tensors take their outer step together: parts of equal size, or layers in the order of the forward pass."""

import re
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp_jax import _arguments, _checks
from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import PyTree

Order = Literal["strided", "sequential"]
Parts = int | Callable[[PyTree], PyTree]
"""The number of parts, of about equal size; or a function of the parameters' shapes that returns each leaf's part."""


@_arguments.checked
def fragments(number: int, *, layers: Sequence[str], order: Order = "strided") -> Callable[[PyTree], PyTree]:
    r"""Divides a model into fragments of whole layers: ``parts=gc.fragments(...)`` of :func:`gradcomp_jax.diloco`.

    With layers :math:`0, 1, ..., L - 1` in the order of the forward pass and :math:`P` fragments, layer :math:`l` is in
    fragment :math:`l \bmod P` (strided) or :math:`\lfloor l P / L \rfloor` (sequential). Fragments have their turns in the
    order of their numbers, the last at the end of each period.

    Each pattern stands for one layer. If its matches contain numbers, it stands for one layer for each different number, in
    numerical order: ``r"layers_\d+"`` is layers_0, layers_1, ..., layers_10. A leaf belongs to the first pattern that
    is found in its path. Layers that a scan has stacked into one leaf count as one layer: their fragment is the whole leaf.

    Example:
        >>> parts = gc.fragments(2, layers=("kernel", "bias"))
        >>> parts(params)  # the number of each leaf's fragment
        {'bias': 1, 'kernel': 0}
        >>> streaming = gc.diloco(gc.dense(axis_name="data"), axis_name="data", every=30, parts=parts)

    Args:
        number: number of fragments, at most the number of layers.
        layers: regular expressions in the order of the forward pass, searched for anywhere in a path, which reads like
            ``"layers_0/kernel"``.
        order: ``strided`` or ``sequential``.

    Returns:
        A function of the parameters, or of their shapes, that returns a tree of numbers from 0 on.

    Raises:
        ValueError: for a number below 1, no layers, and a pattern that is not a regular expression; when called, for a leaf
            without a layer, a pattern that is found nowhere, and fewer layers than fragments.

    References:
        Douillard et al., 2025, Streaming DiLoCo, https://arxiv.org/abs/2501.18512, section 2.2.
    """
    number = _checks.positive_int("number", number)
    _checks.one_of("order", order, get_args(Order))
    if isinstance(layers, str) or not layers:
        raise ValueError(
            f"layers must be patterns in the order of the forward pass, such as ('embed',), got {layers!r}"
        )
    found = []
    for pattern in layers:
        try:
            found.append(re.compile(pattern).search)
        except re.error as error:
            raise ValueError(f"layers must be regular expressions, got {pattern!r}: {error}") from error

    def layer_of(name: str) -> tuple[int, ...]:
        for i, search in enumerate(found):
            if match := search(name):
                return (i, *map(int, re.findall(r"\d+", match.group())))
        raise ValueError(
            f"no pattern of layers={tuple(layers)} is found in {name!r}; add one where its forward pass is"
        )

    def numbers(params: PyTree) -> PyTree:
        paths, treedef = jax.tree_util.tree_flatten_with_path(params)
        keys = [layer_of(path_name(path)) for path, _ in paths]
        forward = sorted(set(keys))
        if idle := [layers[i] for i in range(len(layers)) if not any(key[0] == i for key in forward)]:
            raise ValueError(
                f"the pattern {idle[0]!r} of layers is found in none of {len(paths)} paths, which read like"
                f" {path_name(paths[0][0])!r}, or only where an earlier pattern is found as well; mend it or leave it out"
            )
        count = len(forward)
        if count < number:
            raise ValueError(f"{count} layers cannot be divided into {number} fragments: give at most {count}")
        place = {key: i % number if order == "strided" else i * number // count for i, key in enumerate(forward)}
        return jax.tree.unflatten(treedef, [place[key] for key in keys])

    return numbers


def members_of(parts: Parts, tree: PyTree) -> list[list[int]]:
    """Returns the numbers of each part's leaves; the part whose turn ends the period comes first.

    Raises:
        ValueError: if there are fewer leaves than parts, or the function does not return a tree of numbers from 0 on, each of
            which some leaf has.
    """
    if not callable(parts):
        return cut(tree, parts)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), tree)
    chosen = parts(shapes)
    remedy = "parts must return for each leaf of the parameters the number of its fragment, such as gc.fragments does"
    try:
        full = jax.tree.map(lambda number, part: jax.tree.map(lambda _: number, part), chosen, shapes)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{remedy}: {error}") from error
    numbers = jax.tree.leaves(full)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < 0:
            raise ValueError(f"{remedy}, an integer from 0 on; got {number!r}")
    count = max(numbers, default=0) + 1
    members = [[i for i, number in enumerate(numbers) if number == j] for j in reversed(range(count))]
    if empty := [count - 1 - j for j, leaves in enumerate(members) if not leaves]:
        raise ValueError(
            f"fragment {empty[-1]} of {count} has no tensor: number the fragments 0, 1, 2, ... without a gap"
        )
    return members


def cut(tree: PyTree, parts: int) -> list[list[int]]:
    """Returns the leaves' numbers in parts of about equal size, in the order of the tree, and in each at least one.

    Raises:
        ValueError: if there are fewer leaves than parts.
    """
    sizes = [jnp.size(leaf) for leaf in jax.tree.leaves(tree)]
    if len(sizes) < parts and parts > 1:
        raise ValueError(f"a tree of {len(sizes)} tensors cannot be cut into parts={parts}: give at most {len(sizes)}")
    total, seen = sum(sizes), 0
    result: list[list[int]] = [[] for _ in range(parts)]
    for i, size in enumerate(sizes):
        # A leaf's middle decides its part, provided that the remaining leaves can still fill the remaining parts.
        middle = int((seen + size / 2) * parts / max(total, 1))
        begun = next((j for j in reversed(range(parts)) if result[j]), 0)
        least = parts - (len(sizes) - i)
        first = begun if not result[begun] else begun + 1
        result[max(min(middle, first, parts - 1), least, begun)].append(i)
        seen += size
    return result
