"""Refuses one worker's part of a state that was stacked under ``pmap``, as ``flax.jax_utils.unreplicate`` leaves it."""

import jax
import numpy as np

from gradcomp_jax._typing import PyTree
from gradcomp_jax.per_device import is_per_device
from gradcomp_jax.training.carried import Saved, exchanges_of, fits, marks_of, names_of
from gradcomp_jax.training.resize import array_of

_INSTEAD = (
    "x[0] of every leaf but PerDevice ones, by jax.tree.map(lambda x: x if isinstance(x, gradcomp_jax.PerDevice) else"
    " x[0], state, is_leaf=lambda x: isinstance(x, gradcomp_jax.PerDevice))"
)


def refuse_unreplicated(state: PyTree) -> None:
    """Refuses one worker's memories and owners' rows if the rows show that there were more workers.

    The state of a method without owners does not show it.
    """
    for prefix, exchange in exchanges_of(state):
        ratio = exchange.memory_ratio
        if not is_per_device(ratio) or np.shape(array_of(ratio)) != (ratio.shards,):
            continue
        for name, mark in marks_of(exchange):
            rows = np.shape(array_of(mark))
            if mark.kind == "shard" and not fits(rows, mark, 1):
                raise ValueError(
                    f"{prefix + name!r} has the {rows[0]} rows of one of several owners, and the memories beside it are of one"
                    " worker: flax.jax_utils.unreplicate, or x[0] of a PerDevice leaf, drops what all other workers have not"
                    " sent yet. Save a state of gradcomp_jax.state_axes as it is, and of one that is stacked as a whole"
                    f" {_INSTEAD}"
                )


def refuse_other_stacking(saved: Saved, like: PyTree) -> None:
    """Refuses a checkpoint that is stacked as a whole if the state is not, and the reverse."""
    for prefix, exchange in exchanges_of(like):
        name = f"{prefix}{next(iter(names_of(exchange)))}"
        ours, theirs = np.ndim(jax.tree.leaves(exchange)[0]), len(saved[name].shape) if name in saved else 0
        if name not in saved or ours == theirs:
            continue
        if theirs > ours:
            raise ValueError(
                "the checkpoint is of a state that is stacked as a whole, as jax.pmap has it without out_axes, and this one is"
                " not: restore it into a state that is stacked likewise, of as many workers"
            )
        raise ValueError(
            "this state is stacked as a whole, as flax.jax_utils.replicate and jax.pmap without out_axes have it, and the"
            " checkpoint is not: restore into a state of gradcomp_jax.state_axes, or of this one into"
            f" {_INSTEAD}. A checkpoint of flax.jax_utils.unreplicate has one worker's memories alone"
        )
