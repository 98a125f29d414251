"""Masks: which leaves to compress, as :func:`optax.masked` takes them."""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gradcomp_jax import _arguments
from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import PyTree
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.core.matrix_view import Matrix, dimensions, says, sides_of
from gradcomp_jax.core.policies import smaller

Mask = PyTree | Callable[[PyTree], PyTree]
"""A tree of booleans, the parameters' or a prefix of it, or a function of the parameters' shapes that returns one."""


@_arguments.checked
def at_least(size: int, *, ndim: int = 2) -> Mask:
    """Makes a mask of the leaves with at least ``size`` entries and ``ndim`` dimensions.

    Stacked vectors, such as the scales of all layers in ``layers/norm/scale``, are vectors: see
    :func:`gradcomp_jax.core.policies.is_vector`, and :func:`stacked` for those with other names.

    Args:
        size: entries.
        ndim: dimensions; 0 takes vectors and scalars as well.
    """

    def large(path: tuple, leaf: Any) -> bool:
        return dimensions(path_name(path), leaf.shape) >= ndim and leaf.size >= size

    return lambda params: jax.tree_util.tree_map_with_path(large, params)


@_arguments.checked
def stacked(layers: Matrix, mask: Mask | None = None) -> Mask:
    """Makes a mask of the leaves that are matrices in each layer, where leading dimensions number the layers.

    Example::

        gc.terngrad(axis_name="data", mask=gc.masks.stacked({"blocks/": 1}))

    Args:
        layers: how many leading dimensions number the layers, by path, as ``matrix=`` of :func:`gradcomp_jax.powersgd` has it.
            ``0`` says that a tensor is a matrix, whatever its name.
        mask: for the leaves that ``layers`` does not name; those with two or more dimensions by default, as :func:`at_least`
            counts them.

    Raises:
        ValueError: as ``matrix=`` does.
        TypeError: likewise.
    """
    sides, others = sides_of(layers), at_least(0) if mask is None else mask

    def matrices(params: PyTree) -> PyTree:
        rest = jax.tree.unflatten(jax.tree.structure(params), by_leaf(others, params))

        def is_matrix(path: tuple, leaf: Any, other: bool) -> bool:
            name, spec = path_name(path), jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            return sides(name, spec) is not None if says(layers, name, spec) else other

        return jax.tree_util.tree_map_with_path(is_matrix, params, rest)

    return matrices


@_arguments.checked
def without(pattern: str, mask: Mask | None = None) -> Mask:
    r"""Makes a mask that leaves out the leaves whose path matches.

    Example::

        gc.terngrad(axis_name="data", mask=gc.masks.without("classifier"))

    Args:
        pattern: a regular expression, searched for anywhere in a path, which reads like ``"encoder/layer_0/kernel"``.
        mask: for the other leaves; those with two or more dimensions by default.

    Raises:
        ValueError: if ``pattern`` is not a regular expression.
    """
    try:
        found = re.compile(pattern).search
    except re.error as error:
        raise ValueError(f"pattern must be a regular expression, got {pattern!r}: {error}") from error
    others = at_least(0) if mask is None else mask

    def without_pattern(params: PyTree) -> PyTree:
        kept = jax.tree.unflatten(jax.tree.structure(params), by_leaf(others, params))
        return jax.tree_util.tree_map_with_path(lambda path, keep: keep and not found(path_name(path)), kept)

    return without_pattern


@_arguments.checked
def gains(compressor: Compressor, dense: Compressor) -> Mask:
    """Makes the default mask: two or more dimensions, and a payload smaller than the dense one. Stacked vectors are vectors."""

    def gain(path: tuple, leaf: Any) -> bool:
        return dimensions(path_name(path), leaf.shape) >= 2 and smaller(compressor, dense, leaf.shape)

    return lambda params: jax.tree_util.tree_map_with_path(gain, params)


def by_leaf(mask: Mask, tree: PyTree) -> list[bool]:
    """Returns what a mask says of every leaf of a tree of shapes.

    Raises:
        ValueError: if the mask is neither the tree's nor a prefix of it, or has other leaves than booleans.
    """
    booleans = mask(tree) if callable(mask) else mask
    remedy = (
        "mask must be a tree of booleans, with the structure of the parameters or a prefix of it, or a function of the"
        " parameters that returns one, such as lambda params: jax.tree.map(lambda p: p.ndim >= 2, params)"
    )
    for leaf in jax.tree.leaves(booleans):
        if not isinstance(leaf, (bool, np.bool_)):
            raise ValueError(f"{remedy}; got the leaf {leaf!r}")
    try:
        full = jax.tree.map(lambda wanted, part: jax.tree.map(lambda _: bool(wanted), part), booleans, tree)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{remedy}: {error}") from error
    return jax.tree.leaves(full)
