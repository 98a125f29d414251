"""A state's own ``apply_gradients``, with the optimizer of a train step in it."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax

from gradcomp_jax import _compat
from gradcomp_jax._counters import count_on
from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.core.overwritten import joined, refuse_overwritten, trained
from gradcomp_jax.training.state import with_parts

Update = Callable[..., tuple[PyTree, PyTree]]
"""The type of a step's ``update(gradient, opt_state, params, **extra) -> (updates, opt_state)``."""

_PLAIN = ("flax.training.train_state", "TrainState.apply_gradients")


def is_overridden(state: Any) -> bool:
    """Returns whether a state's type has its own ``apply_gradients``, other than that of flax's ``TrainState``."""
    own = getattr(type(state), "apply_gradients", None)
    return own is not None and (getattr(own, "__module__", ""), getattr(own, "__qualname__", "")) != _PLAIN


def applied(
    state: Any, gradient: PyTree, update: Update, *, whole: Callable[[], bool], given: dict[str, Callable[[], Any]]
) -> Any:
    """Returns the state after a step, by its own ``apply_gradients`` if it has one.

    Args:
        state: one worker's part of a train state.
        gradient: this worker's gradient, in the structure of the parameters; with the new values of what is overwritten.
        update: the step's update, instead of that of the state's ``tx``.
        whole: returns whether the parameters are the same on all workers, and whole.
        given: further arguments that a state's own ``apply_gradients`` may take, by name: functions that return them.
    """
    if not is_overridden(state):
        own = trained(state.params)
        updates, opt_state = update(trained(gradient), state.opt_state, own)
        params = joined(state.params, optax.apply_updates(own, updates), gradient)
        return with_parts(state, step=count_on(state.step), params=params, opt_state=opt_state)
    name = f"apply_gradients of {type(state).__name__}"
    if not whole():
        raise ValueError(
            f"{name} moves one set of whole parameters, and here each worker has its own, or a shard: {_INSTEAD}, or leave out"
            " replicas=True and param_specs= along the axis of the workers"
        )
    calls = list[bool]()

    def own_update(updates: PyTree, opt_state: PyTree, params: PyTree | None = None, **extra: Any) -> Any:
        calls.append(True)
        refuse_overwritten(updates)
        return update(updates, opt_state, trained(state.params) if params is None else params, **extra)

    try:
        tx = state.tx
        stand_in = with_parts(state, tx=optax.GradientTransformationExtraArgs(tx.init, own_update))
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name} cannot be given the step's optimizer, as no field tx holds one: {_INSTEAD}"
        ) from error
    _refuse_more(state, name, given)
    taken = {field: value() for field, value in given.items() if takes(state, field)}
    new = stand_in.apply_gradients(grads=gradient, **taken)
    if not calls:
        raise ValueError(
            f"{name} does not call self.tx.update, where the gradients of the workers are averaged: call it with grads,"
            f" self.opt_state and self.params; or {_INSTEAD}"
        )
    new = with_parts(new, tx=tx)
    before: Any = jax.tree.structure(state)
    after: Any = jax.tree.structure(new)
    if before != after:
        raise ValueError(
            f"{name} returns a state of another structure, and a step's state keeps its own: give every field its arrays from"
            f" the start, in init_state. It was {before} and is {after}"
        )
    return new


_INSTEAD = (
    "give make_train_step a state without apply_gradients, such as init_state(params, tx, mesh) returns, and do after each step"
    " what it does besides"
)


def takes(state: Any, name: str) -> bool:
    """Returns whether a state has its own ``apply_gradients``, with an argument of this name."""
    return is_overridden(state) and name in inspect.signature(state.apply_gradients).parameters


def _refuse_more(state: Any, name: str, given: Any) -> None:
    parameters = inspect.signature(state.apply_gradients).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in ("grads", *given)]
    if missing:
        raise ValueError(
            f"{name} takes {', '.join(missing)} besides grads, which a step does not have: give them defaults, or {_INSTEAD}"
        )


def refuse_differing(new: Any, old: Any, axis_name: AxisName) -> None:
    """Refuses what a state's own ``apply_gradients`` computed from one worker's gradient, but must be equal on all workers."""
    if not is_overridden(old) or not _compat.tracks_varying(axis_name):
        return
    for (path, after), before in zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(old), strict=True):
        if _compat.is_traced(after) and set(_compat.varying_along(after, axis_name)) - set(
            _compat.varying_along(before, axis_name)
        ):
            raise ValueError(
                f"{path_name(path)!r} of the state differs by worker after apply_gradients of {type(old).__name__}: its grads"
                f" are each worker's own. Average what is kept of them, with jax.lax.pmean(x, {axis_name!r}), or keep what"
                " self.tx.update returns"
            )


def placed(state: Any, replaced: dict[str, Any], place: Callable[[Any], Any]) -> Any:
    """Returns a state with some fields replaced, and the arrays of all others, such as an average of parameters, placed."""
    others = with_parts(state, **dict.fromkeys(replaced))
    return with_parts(jax.tree.map(place, others), **replaced)
