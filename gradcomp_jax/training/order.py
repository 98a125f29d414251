"""Refuses chains, by the states in them, whose order or nesting would not train."""

from collections.abc import Iterator

import jax
import optax

from gradcomp_jax import _checks, per_device
from gradcomp_jax._typing import PyTree
from gradcomp_jax.core import ExchangeState
from gradcomp_jax.methods.registry import METHODS
from gradcomp_jax.replicas import MARKED, AccumulateState, DelayedState, ElasticState, GossipState, OuterState
from gradcomp_jax.training import refusals

_REPLICAS = {
    ElasticState: "gradcomp_jax.elastic_average",
    GossipState: "gradcomp_jax.gossip",
    OuterState: "gradcomp_jax.outer_average (local_sgd, diloco)",
}
"""States of methods that move parameters to where the replicas meet."""


def refuse_order(opt_state: PyTree, *, replicas: bool) -> None:
    """Refuses a choice around an exchange, and averages of anything but a mean; warns if replicas meet before the optimizer.

    Raises:
        ValueError: for ``optax.apply_if_finite`` around an exchange or a method of replicas, ``optax.MultiSteps`` around an
            exchange, ``gradcomp_jax.accumulate`` around replicas, and for signs or an optimizer's directions instead of a
            mean.
    """
    for steps in per_device.nodes_within(opt_state, lambda node: isinstance(node, optax.MultiStepsState)):
        if not replicas and per_device.nodes_within(steps.inner_opt_state, lambda n: isinstance(n, ExchangeState)):
            raise ValueError(
                "optax.MultiSteps around an exchange adds up each worker's own gradients, and its state counts as the same on"
                " all workers: put gradcomp_jax.accumulate(method, axis_name=..., every=...) in its place, or give"
                " make_train_step(..., accumulate=...) the number of micro-batches"
            )
    for choice in per_device.nodes_within(opt_state, lambda node: isinstance(node, optax.ApplyIfFiniteState)):
        if per_device.nodes_within(choice.inner_state, lambda node: isinstance(node, (ExchangeState, *MARKED))):
            raise ValueError(refusals.CHOICE)
    for node in per_device.nodes_within(opt_state, lambda node: isinstance(node, AccumulateState)):
        if replicas and per_device.nodes_within(node.inner, lambda node: isinstance(node, (DelayedState, *_REPLICAS))):
            raise ValueError(
                "gradcomp_jax.accumulate is for exchanges of gradients, and here replicas are inside: give"
                " make_train_step(..., accumulate=...) the number of batches to a step of theirs"
            )
    # A delayed average is one of replicas if they continue with their own gradients, which the mean then replaces.
    averages = (ElasticState, DelayedState) if replicas else (ElasticState,)
    for node in per_device.nodes_within(opt_state, lambda node: isinstance(node, averages)):
        for exchange in per_device.nodes_within(node.method, lambda node: isinstance(node, ExchangeState)):
            kind = _update_of(exchange)
            if kind != "mean":
                raise ValueError(
                    f"the update of gradcomp_jax.{exchange.made_by.name} is a {kind} and no mean, which is what replicas are"
                    " averaged with here: take a method such as gradcomp_jax.block_quantized or gradcomp_jax.dgc"
                )
    for method in dict.fromkeys(_before_others(opt_state)):
        _checks.warn(
            f"{method} moves parameters to where the replicas meet, and what comes after it in the chain changes that: put it"
            " last, after the optimizer"
        )


def refuse_lookahead(
    opt_state: PyTree, params: PyTree | None = None, gradient: PyTree = (), *, in_a_step: bool = False
) -> None:
    """Refuses ``optax.lookahead`` unless it gets its two sets of parameters and the gradient of one of them.

    Raises:
        ValueError: in a train step, which differentiates all parameters; for parameters without ``fast``, a gradient of both
            sets, and an exchange beside it in a chain, whose state would be for both sets.
    """
    around = per_device.nodes_within(opt_state, lambda node: isinstance(node, optax.LookaheadState))
    if not around:
        return
    every, inside = (
        per_device.nodes_within(tree, lambda n: isinstance(n, ExchangeState)) for tree in (opt_state, around)
    )
    if in_a_step or not hasattr(params, "fast") or hasattr(gradient, "fast") or len(every) > len(inside):
        raise ValueError(
            "optax.lookahead moves two sets of parameters by the gradient at params.fast, and a train step, which"
            " differentiates all parameters, has no place for it: make them with optax.LookaheadParams.init_synced(params), put"
            " the exchange inside, optax.lookahead(optax.chain(exchange, optimizer), ...), and in a loop of your own (of"
            " gradcomp_jax.init_opt_state, or gradcomp_jax.unreduced) call tx.update with the gradient of"
            " gradcomp_jax.local_value_and_grad(loss, ...)(params.fast, batch) and with params"
        )


def _update_of(exchange: ExchangeState) -> str:
    name, options = exchange.made_by.name, dict(exchange.made_by.options)
    return "mean" if name not in METHODS or options.get("signed") == "False" else METHODS[name].update


def _before_others(state: PyTree) -> Iterator[str]:
    """Yields the methods of replicas that are not the last link of a chain."""
    if isinstance(state, (ExchangeState, *_REPLICAS)):
        return
    links = jax.tree.leaves(state, is_leaf=lambda node: node is not state)
    for link in links:
        if link is not state:
            yield from _before_others(link)
    for link in state[:-1] if type(state) is tuple else ():
        for node in per_device.nodes_of(link, lambda node: isinstance(node, tuple(_REPLICAS))):
            yield _REPLICAS[type(node)]
