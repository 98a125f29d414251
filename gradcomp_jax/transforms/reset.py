"""Repairs a state from elsewhere whose exchanges hold numbers that are not finite."""

from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax import _arguments
from gradcomp_jax.core.exchange import ExchangeState
from gradcomp_jax.per_device import nodes_within
from gradcomp_jax.transforms.frozen_adam import FrozenAdamState
from gradcomp_jax.transforms.loss_scale import INITIAL, LossScaleState, is_scale
from gradcomp_jax.transforms.sums import RunningSumState


@_arguments.checked
def reset_nonfinite(state: Any) -> tuple[Any, int]:
    """Returns a state whose exchanges hold only finite numbers, and how many entries were not finite.

    It is for a state that came from elsewhere: an exchange itself stores nothing that is not finite. Finite entries stay
    unchanged, and so does everything that is not an exchange's (parameters, an optimizer's moments). Call it outside
    ``jax.jit`` and ``jax.shard_map``, in every process.

    Entries of memories and of owners' residuals that are not finite become zeros, and what they held is lost. A scale of a
    memory, with all entries that share it, counts as one entry. A low-rank start that is not finite
    is drawn again, because a column of zeros would stay zero. EF21's estimates all begin again from zero, because their
    mean must stay the sum of what was sent. An invalid loss scale becomes the default of the first scale.

    Example:
        >>> tx = optax.chain(gc.topk_sgd(axis_name="data"), optax.sgd(0.1))
        >>> state, count = gc.reset_nonfinite(gc.init_state(params, tx, mesh))
        >>> count
        0

    Args:
        state: a train state, or an optimizer's, with exchanges in it.

    Returns:
        The state, in which arrays without such an entry are the same arrays; and the number of entries that were reset, over
        all workers. 0 says that all entries were finite.

    Raises:
        ValueError: if there is no exchange in the state.
    """
    if not nodes_within(state, lambda node: isinstance(node, ExchangeState)):
        raise ValueError("there is no exchange in this state: pass the whole train state, or the optimizer's")
    found = [0]

    def finite(leaf: Any, drawn: bool = False) -> Any:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            return leaf
        bad = ~jnp.isfinite(leaf)
        count = int(jnp.sum(bad))
        found[0] += count
        if not count:
            return leaf
        return jnp.where(bad, jax.random.normal(jax.random.key(0), bad.shape, leaf.dtype) if drawn else 0, leaf)

    def mend(node: Any) -> Any:
        if isinstance(node, ExchangeState):
            kept = {name: jax.tree.map(finite, getattr(node, name)) for name in ("memory", "server", "memory_ratio")}
            return node._replace(**kept, compressor=jax.tree.map(lambda a: finite(a, drawn=True), node.compressor))
        if isinstance(node, FrozenAdamState):
            # An entry whose variance is zero takes its tensor's mean.
            whole = {name: jax.tree.map(finite, getattr(node, name)) for name in ("mean", "variance")}
            return node._replace(**whole, dense=_within(mend, node.dense), compressed=_within(mend, node.compressed))
        if isinstance(node, LossScaleState):
            whole_scale = bool(is_scale(node.scale))
            found[0] += not whole_scale
            scale = node.scale if whole_scale else jnp.full_like(node.scale, INITIAL)
            return node._replace(scale=scale, inner=_within(mend, node.inner))
        if isinstance(node, RunningSumState):
            before = found[0]
            mended = RunningSumState(jax.tree.map(finite, node.total), _within(mend, node.inner))
            return mended if found[0] == before else _within(_begun_again, mended)
        return node

    return _within(mend, state), found[0]


def _within(mend: Any, tree: Any) -> Any:
    """Returns a tree with some of its nodes replaced."""
    kinds = (ExchangeState, FrozenAdamState, LossScaleState, RunningSumState)
    return jax.tree.map(mend, tree, is_leaf=lambda n: isinstance(n, kinds))


def _begun_again(node: Any) -> Any:
    """Returns a running sum, or the exchange inside it, as before anything was sent."""
    if isinstance(node, RunningSumState):
        return RunningSumState(jax.tree.map(jnp.zeros_like, node.total), _within(_begun_again, node.inner))
    if isinstance(node, ExchangeState):
        return node._replace(
            **{name: jax.tree.map(jnp.zeros_like, getattr(node, name)) for name in ("memory", "server")}
        )
    return node
