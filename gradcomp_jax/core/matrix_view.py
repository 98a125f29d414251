"""Which of a tensor's dimensions number its matrices, which are rows and which are columns; and which tensors are vectors."""

import math
import re
from collections.abc import Callable, Mapping

import jax

from gradcomp_jax import _checks

Split = int | tuple[int, int]
"""``batch``: so many leading dimensions number the matrices, and the others are split evenly. ``(batch, rows)``: the next
``rows`` dimensions are the rows, and the rest are the columns."""

Matrix = Mapping[str, Split] | Callable[[str, jax.ShapeDtypeStruct], Split | None]
"""A split for each pattern; the first pattern that is found in the path decides. Or a function ``matrix(path, leaf)``. A tensor
without a split (``None``) is a single matrix, split evenly."""

Sides = Callable[[str, jax.ShapeDtypeStruct], tuple[int, int] | None]
"""``sides(path, leaf)``: rows and columns of each of a tensor's matrices; ``None`` for a tensor that is not a matrix."""


def even_split(shape: tuple[int, ...]) -> int:
    """Returns how many leading dimensions are rows, so that rows + columns are fewest; of equal splits, the fewest dimensions.

    A low-rank factor pair is ``rank * (rows + columns)`` numbers, so the fewest sides are the fewest bytes. A dense layer
    over several dimensions is split where its inputs end and its outputs begin: ``[embed, heads, head_dim]`` after the
    first and ``[heads, head_dim, embed]`` before the last. A convolution kernel ``[height, width, in, out]`` is split before
    the last, which is the paper's fold, as long as it has at least as many output channels as its window has entries. With
    fewer, both folds keep about as much of the gradient and the paper's sends more.

    Args:
        shape: two or more dimensions.
    """
    return min(range(1, len(shape)), key=lambda k: math.prod(shape[:k]) + math.prod(shape[k:]))


def sides_of(matrix: Matrix | None) -> Sides:
    """Returns the rule that ``matrix=`` stands for.

    Raises:
        ValueError: for a pattern that is not a regular expression and a split that leaves no rows; when traced, for a split
            that leaves a tensor no columns.
        TypeError: if ``matrix`` is not a mapping or function, and for a split that is not a number or pair.
    """
    if matrix is None:
        return lambda path, leaf: _sides(path, leaf.shape, 0)
    if callable(matrix):
        return lambda path, leaf: _sides(path, leaf.shape, _checked(path, matrix(path, leaf)))
    if not isinstance(matrix, Mapping):
        raise TypeError(
            "matrix must map patterns of paths to splits, such as {'layers/': 1}, or be a function (path, leaf) -> split,"
            f" got {matrix!r}"
        )
    rules = []
    for pattern, split in matrix.items():
        try:
            rules.append((re.compile(pattern), _checked(pattern, split)))
        except re.error as error:
            raise ValueError(f"matrix must map regular expressions, got {pattern!r}: {error}") from error

    def sides(path: str, leaf: jax.ShapeDtypeStruct) -> tuple[int, int] | None:
        split = next((split for pattern, split in rules if pattern.search(path)), 0)
        return _sides(path, leaf.shape, split)

    return sides


def says(matrix: Matrix | None, path: str, leaf: jax.ShapeDtypeStruct) -> bool:
    """Returns whether a split is given for a tensor."""
    if matrix is None:
        return False
    if callable(matrix):
        return matrix(path, leaf) is not None
    return any(re.search(pattern, path) for pattern in matrix)


def last_against_others(path: str, leaf: jax.ShapeDtypeStruct) -> tuple[int, int] | None:
    """Returns the sides of a matrix whose columns are the last dimension, and whose rows are all others."""
    return (leaf.size // leaf.shape[-1], leaf.shape[-1]) if len(leaf.shape) >= 2 and leaf.size else None


def _checked(name: str, split: Split | None) -> Split:
    if split is None:
        return 0
    pair = split if isinstance(split, tuple) else (split, 1)
    if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) for n in pair):
        raise TypeError(
            f"matrix must give {name!r} the number of leading dimensions that number its matrices, such as 1 for stacked"
            f" layers, or a pair (batch, rows) of numbers of dimensions, got {split!r}"
        )
    _checks.non_negative_int(f"the batch dimensions that matrix gives {name!r}", pair[0])
    _checks.positive_int(f"the row dimensions that matrix gives {name!r}", pair[1])
    return split


def _sides(path: str, shape: tuple[int, ...], split: Split) -> tuple[int, int] | None:
    batch, rows = split if isinstance(split, tuple) else (split, None)
    one = shape[batch:]
    if rows is not None and len(one) <= rows:
        raise ValueError(
            f"matrix={split} leaves no columns of {path!r} of shape {shape}; give it {batch} alone, with which vectors go"
            " dense, or a pattern that is not found in its path"
        )
    if len(one) < 2 or not math.prod(shape):
        return None
    k = even_split(one) if rows is None else rows
    return math.prod(one[:k]), math.prod(one[k:])


# Vectors that look like matrices: those of all layers, stacked for a scan over layers. Their names identify them.
_VECTORS = {"bias", "biases", "scale", "scales", "shift", "gamma", "beta", "offset"}
_NORMS = ("ln", "bn", "gn")
_WEIGHTS = {"weight", "w", "g"}
_ENDS = {"value", "param"}


def is_vector(path: str) -> bool:
    """Returns whether a path names a bias, or a scale or shift of a norm, which have one dimension in one layer.

    The last word of the last component decides: ``bias``, ``scale``, ``shift``, ``gamma``, ``beta``, ``offset``, or a norm
    (``attn_norm``, ``ln_1``, ``RMSNorm_0``); or ``weight``, ``w`` or ``g`` right after a norm. Numbers do not count as words.
    ``b`` is not among these words, because it also names one factor of a low-rank pair.

    Args:
        path: as :func:`gradcomp_jax._specs.path_name` writes it, ``"layers/attn_norm/scale"``.
    """
    words = [word for word in re.split(r"[^a-z]+", path.lower()) if word]
    while words and words[-1] in _ENDS:
        words.pop()
    if not words:
        return False
    *before, last = words
    return last in _VECTORS or _is_norm(last) or (last in _WEIGHTS and bool(before) and _is_norm(before[-1]))


def _is_norm(word: str) -> bool:
    return word in _NORMS or word.endswith("norm")


def dimensions(path: str, shape: tuple[int, ...]) -> int:
    """Returns how many dimensions a tensor has in one layer: at most one where its path names a vector."""
    return min(len(shape), 1) if is_vector(path) else len(shape)
