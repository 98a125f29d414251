"""Errors for a state that another method made: what they say, and where they are raised."""

import contextvars
from typing import Any

import optax

from gradcomp_jax._typing import PyTree
from gradcomp_jax.core.made_by import MadeBy
from gradcomp_jax.core.placeholders import Init, not_of_params
from gradcomp_jax.per_device import nodes_within

_MADE_BY = {
    "AccumulateState": "accumulate",
    "DelayedState": "delayed_average",
    "ElasticState": "elastic_average",
    "GossipState": "gossip",
    "OuterState": "outer_average (local_sgd, diloco, sparse_loco)",
    "RunningSumState": "running_sum (ef21)",
    "ShardState": "hierarchical or model_parallel",
    "SwitchedState": "switched",
}
"""What makes a state, by its type; the state of an exchange names its maker itself."""

_EXCHANGE = "exchange"

_KINDS = ("compressor", "memory")
"""Options that identify an exchange that no method has named."""

_DEFAULT = "Residual"
"""The default memory of an exchange."""

_within: contextvars.ContextVar[bool] = contextvars.ContextVar("within a method", default=False)


def of_state(kind: type, init: Init, update: Any, maker: MadeBy | None = None) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that refuses other states, and whose state has no array like a parameter."""
    return optax.GradientTransformationExtraArgs(not_of_params(init), only_of(kind, update, maker))


def only_of(kind: type, update: Any, maker: MadeBy | None = None) -> Any:
    """Returns an update that refuses states of other types, and those of another maker, before it reads them."""

    def checked(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        # A call without a state is left to the update, whose error says what is wrong.
        if state is not None and not isinstance(state, kind):
            raise ValueError(_inside(state, kind, maker) or _sentence(said_of(state), _name(kind, maker)))
        if maker is not None and not _within.get():
            refuse_other_method(state, maker)
        return update(updates, state, params, **extra)

    return checked


def refuse_other_method(state: Any, maker: MadeBy) -> None:
    """Raises a ValueError for a state that another method made: it names both, and how to continue from such a state."""
    for node in nodes_within(state, _is_exchange):
        made = node.made_by
        if made.name and made.name != maker.name:
            raise ValueError(_sentence(said_of(node), f"gradcomp_jax.{maker.name}"))
        if made.name == _EXCHANGE:
            _refuse_other_kinds(made, maker)


def _refuse_other_kinds(made: MadeBy, maker: MadeBy) -> None:
    """Refuses the state of an exchange with another compressor or memory, where no method has named it."""
    kinds = [{option: dict(by.options).get(option) for option in _KINDS} for by in (made, maker)]
    for said in kinds:
        said["memory"] = _DEFAULT if said["memory"] == "None" else said["memory"]
    if kinds[0] != kinds[1]:
        of = [", ".join(f"{option}={value}" for option, value in said.items()) for said in kinds]
        raise ValueError(_sentence(*(f"gradcomp_jax.{_EXCHANGE}({options})" for options in of)))


def of_method(tx: optax.GradientTransformation, maker: MadeBy) -> Any:
    """Returns a method's update, which refuses what another method made: all exchanges inside it at once."""

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        if not _within.get():
            refuse_other_method(state, maker)
        token = _within.set(True)
        try:
            return optax.with_extra_args_support(tx).update(updates, state, params, **extra)
        finally:
            _within.reset(token)

    return update


REMEDY = (
    "To go on, call gradcomp_jax.replace_method(state, tx, mesh), which keeps parameters, counts and the optimizer's moments"
    " where they have a place in the new chain; or build the step with what made the state"
)
"""What to do with the state of another chain."""


class NoWrapper:
    """Raises an error where a wrapper of optax, such as ``optax.masked``, takes the state for its own."""

    def __getattr__(self, name: str) -> Any:
        """Names the remedy where a wrapper reads the state inside its own."""
        if name in _INSIDE:
            raise AttributeError(
                f"you changed a mask, labels or what else is around the exchange: this state was made by {said_of(self)} alone,"
                f" and is given to what has it inside, such as {_INSIDE[name]}. {REMEDY}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


_INSIDE = {
    "inner_state": "optax.masked",
    "inner_states": "optax.multi_transform",
    "inner_opt_state": "optax.MultiSteps",
    "fast_state": "optax.lookahead",
    "hyperparams": "optax.inject_hyperparams",
}
"""Where wrappers of optax keep the state inside, by the field's name."""


def _inside(state: Any, kind: type, maker: MadeBy | None) -> str:
    """Returns the error for a state of the right kind that lies inside another; empty for other states."""
    made: Any = next(iter(nodes_within(state, lambda n: isinstance(n, kind) or type(n).__name__ in _MADE_BY)), None)
    named = maker is None or getattr(made, "made_by", maker).name == maker.name
    if not isinstance(made, kind) or not (_within.get() or named):
        return ""
    within = "a chain" if type(state) is tuple else type(state).__name__
    return (
        f"you changed a mask, labels or the chain: the state of {said_of(made)} lies inside {within} here, and is given to what"
        f" has nothing around it. {REMEDY}"
    )


def said_of(state: Any) -> str:
    """Returns what made a state, as a user calls it."""
    for node in nodes_within(state, lambda node: _is_exchange(node) or type(node).__name__ in _MADE_BY):
        if _is_exchange(node):
            return f"gradcomp_jax.{node.made_by.name or _EXCHANGE}"
        return f"gradcomp_jax.{_MADE_BY[type(node).__name__]}"
    return f"something without an exchange ({type(state).__name__})"


def _sentence(before: str, now: str) -> str:
    return f"you changed the method: this state was made by {before}, and is given to {now}. {REMEDY}"


def _name(kind: type, maker: MadeBy | None) -> str:
    return f"gradcomp_jax.{maker.name if maker else _MADE_BY[kind.__name__]}"


def _is_exchange(node: Any) -> bool:
    return isinstance(getattr(node, "made_by", None), MadeBy) and hasattr(node, "memory_ratio")
