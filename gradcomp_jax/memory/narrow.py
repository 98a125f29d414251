"""Memories of two bytes or one byte an entry: opened in the first pass of a step, closed in the last."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradcomp_jax import _checks, kernels
from gradcomp_jax._typing import Array

DTYPES = ("float32", *kernels.NARROW)
"""Dtypes that a memory may be kept in."""


class Narrow(NamedTuple):
    """Holds rows with a scale for each stretch of a row; an entry is its value times its scale.

    Attributes:
        scale: float32 ``[rows, stretches]``.
        values: int8 or float8_e4m3fn ``[rows, block]``.
    """

    scale: Any
    values: Any


def is_narrow(node: object) -> bool:
    """Returns whether a node of a state is a :class:`Narrow`, for ``is_leaf``."""
    return isinstance(node, Narrow)


def values_of(node: Any) -> Any:
    """Returns the values of a :class:`Narrow`, and every other node unchanged."""
    return node.values if is_narrow(node) else node


def memory_dtype(dtype: Any) -> str:
    """Returns the name of a dtype that memories may be kept in.

    Raises:
        ValueError: for another one.
    """
    try:
        name = str(jnp.dtype(dtype))
    except TypeError:
        name = dtype
    return _checks.one_of("the dtype of a memory", name, DTYPES)


def zeros(tree: Any, dtype: str) -> Any:
    """Returns rows of zeros as they are kept, for a tree of float32 zeros ``[rows, block]``."""

    def zero(rows: Array) -> Any:
        n, block = rows.shape
        kept = kernels.narrow_dtype(dtype, block)
        values = jnp.zeros(rows.shape, kept)
        if kernels.is_scaled(kept):
            return Narrow(jnp.zeros((n, block // kernels.scale_width(block)), jnp.float32), values)
        return values

    return tree if dtype == "float32" else jax.tree.map(zero, tree)


def opened(tree: Any) -> Any:
    """Returns the float32 rows of a tree of rows as they are kept."""

    def wide(node: Any) -> Array:
        return kernels.from_narrow(node.values, node.scale) if is_narrow(node) else kernels.widened(node)

    return jax.tree.map(wide, tree, is_leaf=is_narrow)


def bounded(tree: Any, most: float) -> Any:
    """Returns rows as they are kept, without entries whose magnitude is above ``most`` or not a number."""

    def of(node: Any) -> Any:
        fits = jnp.abs(opened(node)) <= most
        if is_narrow(node):
            # Where a scale is not finite, a zero would not decode to zero.
            scale = jnp.where(jnp.abs(node.scale) <= most, node.scale, 0.0)
            return Narrow(scale, kernels.chosen(fits, node.values, jnp.zeros((), node.values.dtype)))
        return kernels.chosen(fits, node, jnp.zeros((), node.dtype))

    return jax.tree.map(of, tree, is_leaf=is_narrow)


def scales(tree: Any, dtype: str) -> list[Array | None]:
    """Returns the scales of every array of float32 rows, ``None`` for those without, in a separate pass over the sources."""
    return [kernels.narrow_scale(rows, kernels.narrow_dtype(dtype, rows.shape[1])) for rows in jax.tree.leaves(tree)]


def closed(tree: Any, dtype: str, scale: list[Array | None], key: Array) -> Any:
    """Returns float32 rows as they are kept, with the scales of :func:`scales`; each array is rounded by its own draws."""
    rows, treedef = jax.tree.flatten(tree)
    kept = []
    for number, (wide, unit) in enumerate(zip(rows, scale, strict=True)):
        values = kernels.to_narrow(
            wide, kernels.narrow_dtype(dtype, wide.shape[1]), unit, jax.random.fold_in(key, _STREAM - number)
        )
        kept.append(values if unit is None else Narrow(unit, values))
    return jax.tree.unflatten(treedef, kept)


_STREAM = 2**30
"""A number that no code folds into its key: the rounding of a state does not follow that of a payload."""
