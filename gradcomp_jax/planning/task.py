"""The kind of the model and the optimizer, on which a price in steps depends."""

import re

import jax

from gradcomp_jax import _checks
from gradcomp_jax._typing import PyTree

TASKS = ("conv", "transformer", "lstm")
"""Kinds of models for which there are runs."""
OPTIMIZERS = ("sgd", "adam", "adamw", "adafactor", "lamb", "lion", "muon", "shampoo", "other")
"""Optimizers after the exchange, with momentum or without. Runs exist for ``sgd`` and ``adamw``, which ``adam`` counts as."""

_NAMES = {
    "transformer": re.compile(r"attention|attn|transformer|[qkv]_proj|qkv", re.IGNORECASE),
    "lstm": re.compile(r"lstm|gru(?![a-z])|rnn", re.IGNORECASE),
}
_KERNELS = (1, 3, 5, 7, 9, 11)


def task_of(params: PyTree) -> str | None:
    """Returns the kind of a model by the names and shapes of its tensors; ``None`` if they fit no kind, or two.

    A convolution is a tensor of four dimensions whose first or last two are one small odd number. Patches of vision
    transformers are even.
    """
    found = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name, shape = jax.tree_util.keystr(path), tuple(leaf.shape)
        found |= {task for task, pattern in _NAMES.items() if pattern.search(name)}
        if len(shape) == 4 and any(a == b and a in _KERNELS for a, b in (shape[:2], shape[2:])) and max(shape[:2]) > 1:
            found.add("conv")
    return found.pop() if len(found) == 1 else None


def check(task: str | None, optimizer: str | None) -> None:
    """Refuses an unknown task or optimizer.

    Raises:
        ValueError: with the known ones.
    """
    if task is not None:
        _checks.one_of("task", task, TASKS)
    if optimizer is not None:
        _checks.one_of("optimizer", optimizer, OPTIMIZERS)


def same_optimizer(one: str, other: str) -> bool:
    """Returns whether runs with one optimizer apply to the other."""
    alike = {"adam": "adamw"}
    return alike.get(one, one) == alike.get(other, other)
