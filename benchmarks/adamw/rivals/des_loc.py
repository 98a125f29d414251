"""DES-LOC (2505.22549): Adam on each replica; parameters and both moments are averaged, each at a period of its own."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

import gradcomp_jax as gc
from benchmarks.adamw.rivals.noloco import started
from gradcomp_jax import _compat
from gradcomp_jax.replicas.branching import advance
from gradcomp_jax.replicas.gossip import GossipState


class State(NamedTuple):
    """Holds the steps taken, AdamW's state, and the parameters after the last average, which all replicas know."""

    clock: GossipState
    inner: Any
    center: Any


def des_loc(
    rate: optax.ScalarOrSchedule, *, axis_name: str, every: int, first: int = 3, second: int = 6
) -> optax.GradientTransformationExtraArgs:
    """Makes local AdamW whose replicas average parameters, first and second moments.

    The paper averages float32. Here the difference from the last average and the moments cross in bfloat16.

    Args:
        rate: AdamW's learning rate.
        axis_name: the axis.
        every: steps from one average of the parameters to the next.
        first: averages of the parameters for each one of the first moment; the paper has 3.
        second: the same of the second moment, a multiple of ``first``; the paper has 6.
    """
    adamw = optax.adamw(rate)
    mean = _mean(axis_name)

    def init(params: Any) -> State:
        return State(started(axis_name, every), adamw.init(params), params)

    def update(updates: Any, state: State, params: Any, **extra: Any) -> tuple[Any, State]:
        updates, (adam, *rest) = adamw.update(updates, state.inner, params)
        step = state.clock.step + 1
        turn = step // every
        # Each average takes part in those of the next longer period; no other combination occurs.
        taken = jnp.where(step % every == 0, 1 + (turn % first == 0) + (turn % second == 0), 0)

        def meet(center: Any, own: Any, mu: Any, nu: Any) -> tuple[Any, Any, Any, Any]:
            def of(count: int) -> Callable[[Any], Any]:
                return lambda trees: (*mean(trees[:count]), *trees[count:])

            moved = jax.tree.map(jnp.subtract, own, center)
            moved, mu, nu = lax.switch(taken, [of(n) for n in range(4)], (moved, mu, nu))
            center = jax.tree.map(jnp.add, center, moved)
            return center, center, mu, nu

        carried = (state.center, optax.apply_updates(params, updates), adam.mu, adam.nu)
        center, own, mu, nu = advance(taken > 0, meet, carried)
        inner = (adam._replace(mu=mu, nu=nu), *rest)
        return jax.tree.map(jnp.subtract, own, params), State(
            dataclasses.replace(state.clock, step=step), inner, center
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _mean(axis_name: str) -> Callable[[Any], Any]:
    method = gc.dense(axis_name=axis_name, dtype=jnp.bfloat16)

    def mean(trees: Any) -> Any:
        means = method.update(trees, method.init(trees))[0] if trees else trees
        # Replicas that are equal now differ again in the next step.
        return jax.tree.map(lambda x: _compat.varying(x, axis_name), means)

    return mean
