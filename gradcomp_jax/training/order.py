"""Refuses chains, by the states in them, whose order or nesting would not train, and warns of a momentum twice."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax

from gradcomp_jax import _checks, per_device
from gradcomp_jax._typing import PyTree
from gradcomp_jax.core import ExchangeState
from gradcomp_jax.memory import Momentum
from gradcomp_jax.methods.registry import METHODS, adam_b1
from gradcomp_jax.replicas import MARKED, AccumulateState, DelayedState, ElasticState, GossipState, OuterState
from gradcomp_jax.training import refusals
from gradcomp_jax.transforms.switched import SwitchedState

_REPLICAS = {
    ElasticState: "gradcomp_jax.elastic_average",
    GossipState: "gradcomp_jax.gossip",
    OuterState: "gradcomp_jax.outer_average (local_sgd, diloco)",
}
"""States of methods that move parameters to where the replicas meet."""

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

_LOSS_OF_TWO = "a language model ended 11.9% above dense AdamW with b1=0.9, 0.1% with b1=0 (docs/results/protocol.md)"
"""What this costs: top-k at a density of 0.01, 4,000 steps, each at its best rate."""


def check_order(opt_state: PyTree, tx: optax.GradientTransformation, *, replicas: bool) -> None:
    """Refuses a choice around an exchange, and averages of anything but a mean, and warns of what trains worse.

    Warns of a chain, also inside wrappers, in which a method with a momentum inside, or :func:`gradcomp_jax.accumulate`, which
    would continue between the exchanges, goes before another momentum; of an Adam with a first moment after a residual that
    already is one; and of replicas that meet before the optimizer.
    """
    for steps in _within(opt_state, optax.MultiStepsState):
        if not replicas and _within(steps.inner_opt_state, ExchangeState):
            raise ValueError(
                "optax.MultiSteps around an exchange adds up each worker's own gradients, and its state counts as the same on"
                " all workers: put gradcomp_jax.accumulate(method, axis_name=..., every=...) in its place, or give"
                " make_train_step(..., accumulate=...) the number of micro-batches"
            )
    for choice in _within(opt_state, optax.ApplyIfFiniteState):
        if _within(choice.inner_state, (ExchangeState, *MARKED)):
            raise ValueError(refusals.CHOICE)
    for node in _within(opt_state, AccumulateState):
        if replicas and _within(node.inner, (DelayedState, *_REPLICAS)):
            raise ValueError(
                "gradcomp_jax.accumulate is for exchanges of gradients, and here replicas are inside: give"
                " make_train_step(..., accumulate=...) the number of batches to a step of theirs"
            )
    # A delayed average is one of replicas if they continue with their own gradients, which the mean then replaces.
    averages = (ElasticState, DelayedState) if replicas else (ElasticState,)
    for node in _within(opt_state, averages):
        for exchange in _within(node.method, ExchangeState):
            kind = _update_of(exchange)
            if kind != "mean":
                raise ValueError(
                    f"the update of gradcomp_jax.{exchange.made_by.name} is a {kind} and no mean, which is what replicas are"
                    " averaged with here: take a method such as gradcomp_jax.block_quantized or gradcomp_jax.dgc"
                )
    _warn_of_order(opt_state, tx)


def refuse_lookahead(
    opt_state: PyTree, params: PyTree | None = None, gradient: PyTree = (), *, in_a_step: bool = False
) -> None:
    """Refuses ``optax.lookahead`` unless it gets its two sets of parameters and the gradient of one of them."""
    around = _within(opt_state, optax.LookaheadState)
    if not around:
        return
    every, inside = (_within(tree, ExchangeState) for tree in (opt_state, around))
    if in_a_step or not hasattr(params, "fast") or hasattr(gradient, "fast") or len(every) > len(inside):
        raise ValueError(
            "optax.lookahead moves two sets of parameters by the gradient at params.fast, and a train step, which"
            " differentiates all parameters, has no place for it: make them with optax.LookaheadParams.init_synced(params), put"
            " the exchange inside, optax.lookahead(optax.chain(exchange, optimizer), ...), and in a loop of your own (of"
            " gradcomp_jax.init_opt_state, or gradcomp_jax.unreduced) call tx.update with the gradient of"
            " gradcomp_jax.local_value_and_grad(loss, ...)(params.fast, batch) and with params"
        )


def _within(tree: PyTree, kind: Any) -> list[Any]:
    return per_device.nodes_within(tree, lambda node: isinstance(node, kind))


def _update_of(exchange: ExchangeState) -> str:
    name, options = exchange.made_by.name, dict(exchange.made_by.options)
    return "mean" if name not in METHODS or options.get("signed") == "False" else METHODS[name].update


def _warn_of_order(opt_state: PyTree, tx: optax.GradientTransformation) -> None:
    # Of every Adam whose functions have b1, which no state has; a scheduled one cannot be read.
    decays = [b1 for b1 in _found(tx.update, []) if isinstance(b1, (int, float))]
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
                f" b1={max(decays):g}: {_LOSS_OF_TWO}. Take gradcomp_jax.adamw(learning_rate, exchange), or b1=0"
            )
    for method in dict.fromkeys(_before_others(opt_state)):
        _checks.warn(
            f"{method} moves parameters to where the replicas meet, and what comes after it in the chain changes that: put it"
            " last, after the optimizer"
        )


def _before_others(state: PyTree) -> Iterator[str]:
    """Yields the methods of replicas that are not the last link of a chain."""
    for chain in _chains(state):
        for link in chain[:-1]:
            for node in per_device.nodes_of(link, lambda node: isinstance(node, tuple(_REPLICAS))):
                yield _REPLICAS[type(node)]


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
            after = next(
                (_MOMENTA[type(node)] for node in per_device.nodes_of(link, lambda node: type(node) in _MOMENTA)), None
            )
            if inside and after:
                yield inside, after
            exchanges = _exchanges(link)
            inside = next(filter(None, map(_momentum_inside, exchanges)), inside)
            if exchanges and per_device.nodes_of(link, lambda node: isinstance(node, AccumulateState)):
                inside = _ACCUMULATE


def _momentum_inside(exchange: ExchangeState) -> str:
    """Returns the name of a method with a momentum inside, empty for other methods."""
    name, options = exchange.made_by.name, dict(exchange.made_by.options)
    corrected = any(isinstance(memory, Momentum) for of in exchange.memory for memory in of)
    if not corrected and (name not in METHODS or METHODS[name].momentum != "inside"):
        return ""
    without = options.get("momentum_correction") == "False"
    zero = any(key.rpartition(".")[2] == "momentum" and value in ("0", "0.0") for key, value in options.items())
    return "" if without or zero else f"gradcomp_jax.{name or 'exchange'}"


_MADE = optax.scale_by_adam(b1=0.5).update
_FUNCTION = (_MADE.__module__, _MADE.__qualname__)


def _found(value: Any, seen: list[Any]) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _found(item, seen)
    elif isinstance(value, dict):
        yield from _found(list(value.values()), seen)
    elif hasattr(value, "__wrapped__"):
        yield from _found(value.__wrapped__, seen)
    elif inspect.isfunction(value) and not any(value is function for function in seen):
        seen.append(value)
        inside = _closed_over(value)
        if (value.__module__, value.__qualname__) == _FUNCTION:
            yield inside.get("b1")
        else:
            yield from _found(list(inside.values()), seen)


def _closed_over(function: Callable[..., Any]) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = {}
    for name, cell in cells:
        try:
            found[name] = cell.cell_contents
        except ValueError:  # Not filled yet.
            continue
    return found
