"""Warns of chains that have a momentum twice, or one that steps on zeros."""

from collections.abc import Iterator
from typing import Any

import jax
import optax

from gradcomp_jax import _checks, per_device
from gradcomp_jax._typing import PyTree
from gradcomp_jax.core import ExchangeState
from gradcomp_jax.memory import Momentum
from gradcomp_jax.methods.registry import METHODS, adam_b1
from gradcomp_jax.replicas.accumulate import AccumulateState
from gradcomp_jax.training import first_moments
from gradcomp_jax.transforms.switched import SwitchedState


def warn_of_two_momenta(opt_state: PyTree, tx: optax.GradientTransformation) -> None:
    """Warns of a chain, also inside wrappers, in which a method with a momentum inside goes before another momentum.

    Also warns if :func:`gradcomp_jax.accumulate` goes before a momentum, which would continue between the exchanges, and if an
    Adam with a first moment follows a residual that already is one.
    """
    decays = first_moments.decays(tx)
    for inside, after in dict.fromkeys(_two_momenta(opt_state)):
        if after == "Adam" and decays and not any(decays):
            continue
        if inside == _ACCUMULATE:
            problem = f"{inside} goes around the whole chain, and {after} after it steps on zeros between the exchanges"
            remedy = "gradcomp_jax.accumulate(optax.chain(exchange, optimizer), ...)"
        else:
            problem = f"{inside} has a momentum inside and goes before {after}, which is another"
            remedy = "plain optax.sgd(learning_rate) after it, or in its place a method without one, such as"
            remedy += " gradcomp_jax.block_quantized"
        _checks.warn(f"{problem}: take {remedy}")
    if decays and all(decays):
        for waiting in dict.fromkeys(_before_adam(opt_state)):
            _checks.warn(
                f"{waiting} keeps what it does not send, which is a first moment already, and Adam after it has another, with"
                f" b1={max(decays):g}: {LOSS_OF_TWO}. Take gradcomp_jax.adamw(learning_rate, exchange), or b1=0"
            )


LOSS_OF_TWO = (
    "a small language model ended 11.9% above dense AdamW with b1=0.9, 0.1% with b1=0 (docs/results/protocol.md)"
)
"""What this costs: top-k at a density of 0.01, 4,000 steps, each at its best rate."""


def _chains(state: PyTree) -> Iterator[tuple]:
    """Yields the states of chains, innermost first."""
    if isinstance(state, ExchangeState) or hasattr(state, "dropped"):
        return  # Parts of an exchange or of replicas lie beside each other.
    links = jax.tree.leaves(state, is_leaf=lambda node: node is not state)
    if isinstance(state, SwitchedState):
        # Candidates are alternatives, not a chain.
        links = list(state.inner)
    for link in links:
        if link is not state:
            yield from _chains(link)
    if type(state) is tuple:
        yield state


def _exchanges(link: PyTree) -> list[ExchangeState]:
    return per_device.nodes_of(link, lambda node: isinstance(node, ExchangeState))


def _before_adam(state: PyTree) -> Iterator[str]:
    """Yields the names of the methods with a waiting residual whose exchanges go before an Adam."""
    for chain in _chains(state):
        before: list[str] = []
        for link in chain:
            if per_device.nodes_of(link, lambda node: isinstance(node, optax.ScaleByAdamState)):
                yield from before
            waiting = (e for e in _exchanges(link) if adam_b1(e) == 0 and not _momentum_inside(e))
            before += [f"gradcomp_jax.{e.made_by.name}" for e in waiting]


def _two_momenta(state: PyTree) -> Iterator[tuple[str, str]]:
    for chain in _chains(state):
        inside = ""
        for link in chain:
            after = next((_MOMENTA[type(node)] for node in per_device.nodes_of(link, _is_momentum)), None)
            if inside and after:
                yield inside, after
            exchanges = _exchanges(link)
            inside = next(filter(None, map(_momentum_inside, exchanges)), inside)
            if exchanges and per_device.nodes_of(link, lambda node: isinstance(node, AccumulateState)):
                inside = _ACCUMULATE


_ACCUMULATE = "gradcomp_jax.accumulate"

_MOMENTA = {
    optax.ScaleByAdamState: "Adam",
    optax.ScaleByAmsgradState: "AMSGrad",
    optax.ScaleByAdanState: "Adan",
    optax.ScaleByLionState: "Lion",
    optax.TraceState: "the momentum of optax.sgd",
    optax.EmaState: "optax.ema",
}
"""States of transformations that have a momentum."""


def _is_momentum(node: Any) -> bool:
    return type(node) in _MOMENTA


def _momentum_inside(exchange: ExchangeState) -> str:
    """Returns the name of a method with a momentum inside, empty for other methods."""
    name, options = exchange.made_by.name, dict(exchange.made_by.options)
    corrected = any(isinstance(memory, Momentum) for of in exchange.memory for memory in of)
    if not corrected and (name not in METHODS or METHODS[name].momentum != "inside"):
        return ""
    without = options.get("momentum_correction") == "False"
    zero = any(key.rpartition(".")[2] == "momentum" and value in ("0", "0.0") for key, value in options.items())
    return "" if without or zero else f"gradcomp_jax.{name or 'exchange'}"
