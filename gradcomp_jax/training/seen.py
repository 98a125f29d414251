"""Combines what a loss returns besides its value: some numbers are averaged, some added up, and some are one an example."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax import _checks, _compat, kernels
from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.transforms import participation

KINDS = ("auto", "mean", "sum", "max", "examples")
STATE = "state"
"""The kind of a gradient or of a model state: a mean in its own dtype, rounded down for integers."""
PLAIN = "plain"
"""The kind of what is averaged without weights."""


def kinds_of(asked: PyTree, aux: PyTree, grown: Callable[[], PyTree | None], batch: int | None) -> list[str]:
    """Returns the kind of every leaf of ``aux``.

    Args:
        asked: one of :data:`KINDS` for all; a tree of them, a prefix of ``aux``; or a function of ``aux`` that returns either.
        aux: arrays or shapes.
        grown: returns the shapes that ``aux`` has for a batch of twice the size, ``None`` if the loss takes no such batch.
        batch: the first dimension of the batch; ``None`` without one.
    """
    named, _ = jax.tree_util.tree_flatten_with_path(aux)
    asked = asked(aux) if callable(asked) else asked
    try:
        every = jax.tree.map(lambda kind, part: [kind] * len(jax.tree.leaves(part)), asked, aux)
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"aux= must be one of {KINDS}, or a tree of them such as the loss returns: {error}") from error
    flat = jax.tree.leaves(every)
    larger: list[Any] | None = None
    if any(kind == "auto" and jnp.ndim(leaf) for kind, (_, leaf) in zip(flat, named, strict=True)):
        shapes = grown()
        larger = None if shapes is None or len(jax.tree.leaves(shapes)) != len(named) else jax.tree.leaves(shapes)
    found = []
    for number, (kind, (path, leaf)) in enumerate(zip(flat, named, strict=True)):
        if kind != STATE:
            _checks.one_of("aux", kind, KINDS)
        where = f"aux{f' {path_name(path)!r}' if path else ''}, {jnp.result_type(leaf)}{list(jnp.shape(leaf))},"
        if kind == "auto":
            kind = _told(where, leaf, None if larger is None else larger[number].shape, batch)
        if kind == "examples" and not jnp.ndim(leaf):
            raise ValueError(f"{where} is one number, and aux='examples' is one entry for each example")
        found.append(kind)
    return found


def _told(where: str, leaf: Any, larger: tuple[int, ...] | None, batch: int | None) -> str:
    """Returns the kind of a leaf, by its dtype and by how it grows with the batch."""
    shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
    say = "say what it is by aux='mean', 'sum', 'max' or 'examples', or a tree of these"
    if shape and larger is None:
        if shape[0] == batch:
            return "examples"
        raise ValueError(f"{where} may be one entry for each example or not, which the loss does not show: {say}")
    if shape and larger != shape:
        if larger == (2 * shape[0], *shape[1:]):
            return "examples"
        raise ValueError(
            f"{where} grows with the batch, and not along its first dimension alone: return it with one entry for each example"
            " there, or reduced"
        )
    if jnp.issubdtype(dtype, jnp.inexact):
        return "mean"
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return "sum"
    raise ValueError(
        f"{where} of the workers has no sum or mean that is clear: {say}, with 'max' for a count that all workers have alike"
        " and for whether any is true; or return a number, such as x.astype(jnp.float32) for the share"
    )


def wide(x: Array) -> Array:
    """Widens a summand: narrow floats to float32, booleans and narrow integers to int32."""
    if x.dtype == jnp.bool_ or (jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize < 4):
        return x.astype(jnp.int32)
    return kernels.widened(x)


def begun(kind: str, zero: Array) -> Array:
    """Returns the start of a kind's sum or maximum over micro-batches, from a zero of the type of one of them."""
    zero = as_summand(kind, zero)
    if kind != "max":
        return zero
    return zero + (-jnp.inf if jnp.issubdtype(zero.dtype, jnp.inexact) else jnp.iinfo(zero.dtype).min)


def as_summand(kind: str, x: Array) -> Array:
    """Converts a value to be added up: the mean of an integer is a float."""
    return wide(x.astype(jnp.float32) if kind == "mean" and not jnp.issubdtype(x.dtype, jnp.inexact) else x)


def added(kind: str, total: Array, x: Array, weight: Array | None) -> Array:
    """Adds a micro-batch. One of weight 0 is ignored; integers of a state are the same in all micro-batches."""
    x = as_summand(kind, x)
    if weight is not None and is_mean(kind, x):
        x = jnp.where(weight == 0, 0.0, x * weight)
    elif weight is not None and kind != STATE:
        x = jnp.where(weight == 0, begun(kind, jnp.zeros_like(x)), x)
    return jnp.maximum(total, x) if kind == "max" else total + x


def ended(kind: str, total: Array, dtype: Any, parts: int, weight: Array | None, empty: float) -> Array:
    """Returns the value of all micro-batches; a mean has the value's dtype, and is ``empty`` if all weights are 0."""
    if is_mean(kind, total):
        dtype = dtype if jnp.issubdtype(dtype, jnp.inexact) else total.dtype
        if weight is None:
            return (total / parts).astype(dtype)
        return jnp.where(weight == 0, empty, total / jnp.where(weight == 0, 1.0, weight)).astype(dtype)
    if kind == STATE:
        return (total // parts).astype(dtype)
    return total if kind == "sum" else total.astype(dtype)


def is_mean(kind: str, x: Array) -> bool:
    """Returns whether a kind is an average of floats, and not of integers that stay integers."""
    return kind == "mean" or (kind == STATE and jnp.issubdtype(x.dtype, jnp.inexact))


def over_workers(
    kinds: Sequence[str], tree: PyTree, axis_name: AxisName, *, share: participation.Share | None = None
) -> PyTree:
    """Combines what all workers have seen; arrays with one entry an example stay where they are.

    With a share, means are weighted, and an absent worker is ignored; integers of a state are equal on all workers.
    """
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [jnp.asarray(x) for x in leaves]
    wides = [_compat.varying(as_summand(k, x), axis_name) for k, x in zip(kinds, leaves, strict=True)]
    if share is not None:
        wides = [_weighed(kind, x, share) for kind, x in zip(kinds, wides, strict=True)]
    workers = lax.axis_size(axis_name)
    for these, cross in (
        (("mean", PLAIN), lax.pmean),
        (("sum",), lax.psum),
        (("max",), lax.pmax),
        ((STATE,), lax.psum),
    ):
        mine = [number for number, kind in enumerate(kinds) if kind in these]
        # One all-reduce combines all values of a kind.
        for number, value in zip(mine, cross([wides[n] for n in mine], axis_name) if mine else (), strict=True):
            kind, dtype = kinds[number], leaves[number].dtype
            if kind == STATE:
                value = ended(STATE, value, dtype, workers, None, 0.0)
            keeps = kind == "max" or (kind == "mean" and jnp.issubdtype(dtype, jnp.inexact))
            leaves[number] = value.astype(dtype) if keeps else value
    return jax.tree.unflatten(treedef, leaves)


def _weighed(kind: str, x: Array, share: participation.Share) -> Array:
    if is_mean(kind, x):
        return share.of(x)
    return jnp.where(share.absent, begun(kind, jnp.zeros_like(x)), x) if kind in ("sum", "max") else x


def parted(kinds: Sequence[str], tree: PyTree) -> tuple[PyTree, PyTree]:
    """Splits a tree into two: without the leaves of one entry an example, and with only these; others are ``None``."""
    leaves, treedef = jax.tree.flatten(tree)
    pairs = [(None, x) if kind == "examples" else (x, None) for kind, x in zip(kinds, leaves, strict=True)]
    numbers, examples = (jax.tree.unflatten(treedef, [pair[i] for pair in pairs]) for i in range(2))
    return numbers, examples


def together(numbers: PyTree, examples: PyTree) -> PyTree:
    """Undoes :func:`parted`."""
    return jax.tree.map(lambda a, b: b if a is None else a, numbers, examples, is_leaf=lambda x: x is None)
