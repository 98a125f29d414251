"""Dion2 (2512.16928): of each worker's momentum only some rows cross, and Muon's step is taken on them."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

import gradcomp_jax as gc
from benchmarks.adamw.rivals.ef21_muon import is_hidden, orthonormal
from gradcomp_jax import per_device


class State(NamedTuple):
    """Holds each worker's momentum of the matrices, and AdamW's state for the rest."""

    momentum: Any
    others: Any


def dion2(
    rate: optax.Schedule, *, axis_name: str, fraction: float = 0.25, decay: float = 0.95, others: float = 0.2
) -> optax.GradientTransformationExtraArgs:
    r"""Makes Muon's step on the rows of a matrix, along its shorter side, whose momentum is largest.

    :math:`M_i \leftarrow M_i + g_i`; the rows with the largest :math:`\sum_i \|M_i\|_1` cross, and the update is zero
    elsewhere. What crossed decays to :math:`\mu M_i`, so :math:`(1 - \mu) M_i` counts as sent. The paper exchanges gradients
    densely and saves work; here each worker has a momentum, as in Dion, so that rows are all that crosses, in bfloat16.
    Embeddings and vectors cross dense in bfloat16 and get AdamW's update, at ``others`` times the rate.

    Args:
        rate: the learning rate of the matrices.
        axis_name: the axis.
        fraction: of the rows.
        decay: :math:`\mu`.
        others: learning rate of AdamW over that of the matrices.
    """
    mean = gc.dense(axis_name=axis_name, dtype=jnp.bfloat16)
    adamw = optax.adamw(lambda step: others * rate(step))

    def across(tree: Any) -> Any:
        return mean.update(tree, mean.init(tree))[0]

    def init(params: Any) -> State:
        hidden, rest = split(params)
        return State(
            per_device.lift(jax.tree.map(jnp.zeros_like, hidden)), (adamw.init(rest), jnp.zeros((), jnp.int32))
        )

    def update(updates: Any, state: State, params: Any, **extra: Any) -> tuple[Any, State]:
        gradients, rest = split(updates)
        momentum = jax.tree.map(jnp.add, per_device.lower(state.momentum), gradients)
        rows = {name: m if m.shape[0] <= m.shape[1] else m.T for name, m in momentum.items()}
        norms = across({name: jnp.sum(jnp.abs(m), axis=1) for name, m in rows.items()})
        taken = {name: lax.top_k(n, math.ceil(fraction * n.shape[0]))[1] for name, n in norms.items()}
        sent = {name: rows[name][at] for name, at in taken.items()}
        means, rest = across((sent, rest))
        inner, step = state.others
        rest, inner = adamw.update(rest, inner, split(params)[1])
        made = {}
        for name, m in means.items():
            shape = momentum[name].shape
            whole = jnp.zeros(rows[name].shape).at[taken[name]].set(orthonormal(m))
            made[name] = -rate(step) * math.sqrt(shape[1] / shape[0]) * whole
            rows[name] = rows[name].at[taken[name]].multiply(decay)
            if shape[0] > shape[1]:
                made[name], rows[name] = made[name].T, rows[name].T
        return made | rest, State(per_device.lift(rows), (inner, step + 1))

    return optax.GradientTransformationExtraArgs(init, update)


def split(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the hidden layers' matrices, and the rest."""
    hidden = {name: leaf for name, leaf in tree.items() if is_hidden(name, leaf)}
    return hidden, {name: leaf for name, leaf in tree.items() if name not in hidden}
