"""Explains errors of a state that is given to another chain than its own, because optax does not compare them."""

import contextlib
import operator
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _tracking
from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.core import ExchangeState
from gradcomp_jax.core.changed import REMEDY
from gradcomp_jax.per_device import is_per_device, nodes_within
from gradcomp_jax.replicas import DelayedState, ElasticState, OuterState
from gradcomp_jax.training import refusals

_MASKS = (optax.MaskedState, optax.MaskedNode, optax.PartitionState)


@contextlib.contextmanager
def chain_explained(tx: optax.GradientTransformation, state: PyTree, params: PyTree) -> Iterator[None]:
    """Says, after an error in a chain's update, that its state is of another chain, if that is so.

    Args:
        tx: the chain.
        state: the state that it is given. Only after an error it is compared with the structure that ``tx.init`` makes.
        params: the parameters that ``tx.init`` would be given here.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, AttributeError) and isinstance(error.obj, Compressor):
            raise TypeError(
                f"{type(error.obj).__name__} is a compressor, and a chain is of transformations: put"
                " gradcomp_jax.exchange(compressor, axis_name=...) in its place"
            ) from error
        meetings = nodes_within(state, lambda node: isinstance(node, (DelayedState, ElasticState, OuterState)))
        if any(not nodes_within(node.method, lambda inner: isinstance(inner, ExchangeState)) for node in meetings):
            raise ValueError(
                "a method of gradcomp_jax.replicas averages by the exchange inside of it, and has none: give it a method such"
                " as gradcomp_jax.dense(axis_name=...), and put the optimizer before it in the chain, as in"
                " optax.chain(optax.sgd(0.1), gradcomp_jax.local_sgd(gradcomp_jax.dense(axis_name=...), ...))"
            ) from error
        if params is None or _is_a_sentence(error):
            raise
        try:
            wanted = jax.eval_shape(tx.init, params)
        except Exception:
            raise error from None
        found = _difference(state, wanted, ())
        if found is None:
            raise
        raise ValueError(f"{found}. {REMEDY}") from error


def updated(
    tx: optax.GradientTransformation, gradient: PyTree, state: PyTree, params: PyTree, extra: Any, axis_name: AxisName
) -> Any:
    """Returns a chain's updates and its state; errors of JAX and optax say what to do."""
    with (
        refusals.update_explained(axis_name, extra),
        _tracking.explained(axis_name),
        chain_explained(tx, state, params),
    ):
        return optax.with_extra_args_support(tx).update(gradient, state, params, **extra)


def _is_a_sentence(error: Exception) -> bool:
    """Returns whether the library itself has said what is wrong."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    ours = trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("gradcomp_jax")
    return ours and isinstance(error, (NameError, TypeError, ValueError))


def _children(node: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(node, is_leaf=partial(operator.is_not, node))


def _difference(have: Any, want: Any, path: tuple[Any, ...]) -> str | None:
    """Returns the first place where two states differ, as a sentence; ``None`` if they do not differ."""
    where = f" at {path_name(path)!r}" if path else ""
    leaves = [jax.tree_util.all_leaves([node]) for node in (have, want)]
    if all(leaves):
        if jnp.shape(have) == jnp.shape(want):
            return None
        return (
            f"this state is of other parameters: it has the shape {jnp.shape(have)}{where}, and that is {jnp.shape(want)} of"
            " those it is given with"
        )
    if (type(have) is type(want) and isinstance(have, ExchangeState)) or all(map(is_per_device, (have, want))):
        # Exchanges themselves compare what they are given.
        return None
    mine, theirs = ([] if leaf else _children(node) for leaf, node in zip(leaves, (have, want), strict=True))
    if type(have) is type(want) and [key for key, _ in mine] == [key for key, _ in theirs]:
        pairs = ((key, a, b) for (key, a), (_, b) in zip(mine, theirs, strict=True))
        return next(filter(None, (_difference(a, b, (*path, *key)) for key, a, b in pairs)), None)
    both = (have, want)
    if any(isinstance(node, _MASKS) for node in both) or "inner_states" in path_name(path).split("/")[-1:]:
        return f"you changed a mask or labels: this state has {_said(have)}{where}, and is given where {_said(want)} is"
    if all(type(node) is tuple for node in both):
        return (
            f"you changed the chain: this state is of one of {len(have)} transformations{where}, and is given to one of"
            f" {len(want)}"
        )
    if any(type(node) is OrderedDict for node in both):
        return f"you changed the chain: this state has {_said(have)}{where}, and is given to what has {_said(want)}"
    if all(type(node) in (dict, list, tuple) or leaf for node, leaf in zip(both, leaves, strict=True)):
        return (
            f"this state is of other parameters: it has {_said(have)}{where}, and is given where that is {_said(want)}"
        )
    return f"you changed the optimizer: this state has {_said(have)}{where}, and is given to what has {_said(want)}"


def _said(node: Any) -> str:
    if jax.tree_util.all_leaves([node]):
        return f"an array {list(jnp.shape(node))}"
    if isinstance(node, optax.MaskedNode):
        return "a leaf outside of the mask (MaskedNode)"
    if type(node) is tuple:
        return f"a chain of {len(node)}"
    if isinstance(node, dict):
        return f"{', '.join(map(repr, node))} by name"
    return type(node).__name__
