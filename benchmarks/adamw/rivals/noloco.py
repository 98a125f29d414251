"""NoLoCo (2506.10911): outer steps in which each replica meets one other, drawn at random, instead of all.

The outer step and its constants are from memory, not checked against the paper's equations.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from gradcomp_jax.collectives import permute
from gradcomp_jax.replicas.branching import advance
from gradcomp_jax.replicas.gossip import GossipState
from gradcomp_jax.replicas.nonfinite import counter


class State(NamedTuple):
    """Holds the steps taken, a replica's slow weights and their momentum."""

    clock: GossipState
    slow: Any
    momentum: Any


def noloco(
    *,
    axis_name: str,
    every: int,
    momentum: float = 0.5,
    learning_rate: float = 0.7,
    pull: float = 1.0,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Makes an outer step with the mean of a pair's moves, and a pull toward the mean of the pair's slow weights.

    With :math:`\phi` the slow weights, :math:`\Delta` what the inner steps moved, and bars for means over the pair:
    :math:`\delta \leftarrow \alpha \delta + \beta \bar\Delta - \gamma (\phi - \bar\phi)`, then
    :math:`\phi \leftarrow \phi + \delta`.
    It goes after the inner optimizer. :math:`\Delta` and :math:`\phi` cross in bfloat16, the paper's in float32. Workers are
    a power of two, and partners those whose numbers differ by a random bit pattern: each other worker is as likely.

    Args:
        axis_name: the axis.
        every: inner steps from one outer step to the next.
        momentum: :math:`\alpha`.
        learning_rate: :math:`\beta`.
        pull: :math:`\gamma`, for which the paper proves bounds, with pairs :math:`\alpha < \gamma < \sqrt{2 + \alpha^2}`.
        seed: of the pairs.
    """

    def init(params: Any) -> State:
        return State(started(axis_name, every), params, jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: State, params: Any, **extra: Any) -> tuple[Any, State]:
        step = state.clock.step + 1
        workers = lax.axis_size(axis_name)

        def meet(own: Any, slow: Any, velocity: Any) -> tuple[Any, Any, Any]:
            leaves, treedef = jax.tree.flatten((jax.tree.map(jnp.subtract, own, slow), slow))
            sent = [leaf.astype(jnp.bfloat16) for leaf in leaves]
            drawn = jax.random.randint(jax.random.fold_in(jax.random.key(seed), step), (), 1, workers)
            to = [[worker ^ bits for worker in range(workers)] for bits in range(1, workers)]
            came = lax.switch(drawn - 1, [lambda xs, to=to: permute(xs, to, axis_name) for to in to], sent)
            # Half the difference of what both sent, so that the pair's sum stays, whatever was rounded.
            halves = [(b.astype(jnp.float32) - a.astype(jnp.float32)) / 2 for a, b in zip(sent, came, strict=True)]
            means = [leaf + half for leaf, half in zip(leaves, halves, strict=True)]
            moved, _ = jax.tree.unflatten(treedef, means)
            _, apart = jax.tree.unflatten(treedef, halves)
            velocity = jax.tree.map(lambda v, m, a: momentum * v + learning_rate * m + pull * a, velocity, moved, apart)
            slow = jax.tree.map(jnp.add, slow, velocity)
            return slow, slow, velocity

        carried = (optax.apply_updates(params, updates), state.slow, state.momentum)
        own, slow, velocity = advance(step % every == 0, meet, carried)
        return jax.tree.map(jnp.subtract, own, params), State(
            dataclasses.replace(state.clock, step=step), slow, velocity
        )

    return optax.GradientTransformationExtraArgs(init, update)


def started(axis_name: str, every: int) -> GossipState:
    """Returns a count of steps that is known to be equal on all replicas, unlike the rest of their states."""
    return GossipState(jnp.zeros((), jnp.int32), counter(axis_name), every)
