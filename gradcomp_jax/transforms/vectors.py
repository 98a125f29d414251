"""Vectors that look like matrices: those of all layers, stacked for a scan over layers. Their names identify them."""

import re

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
        path: as :func:`gradcomp_jax.transforms.policies.path_name` writes it, ``"layers/attn_norm/scale"``.
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
