"""Several exchanges in one compiled program; a number in the state says which one is used."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _arguments, _checks, _registered
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.core.changed import only_of
from gradcomp_jax.core.exchange import ExchangeState
from gradcomp_jax.core.placeholders import is_placeholder
from gradcomp_jax.per_device import nodes_of, nodes_within


@_registered.node
@dataclasses.dataclass(frozen=True)
class SwitchedState:
    """Holds the state of :func:`switched`.

    Attributes:
        choice: int32 scalar, the number of the candidate in use; equal on every worker.
        inner: the states of all candidates, in their order.
        names: the candidates' names; static, for checkpoints to compare.
    """

    choice: Array
    inner: tuple
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})


@_arguments.checked
def switched(
    candidates: Mapping[str, optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """Exchanges by one of several candidates, which may change from step to step without a new compilation.

    All candidates are branches of one program on a number in the state. The number is 0, the first candidate, until
    :func:`set_choice` sets another. :func:`gradcomp_jax.choose` says which candidate is the fastest on the present link. A step
    updates the state of its candidate and leaves the states of the others unchanged, bit by bit.

    Law: in every step, the updates so far plus what all candidates keep are the sum of all mean gradients. What a candidate
    holds when another one replaces it stays in its memory, counts as kept, and is sent when the candidate is chosen again.

    State: :class:`SwitchedState`, as large as those of all candidates together. Wire: the candidate's;
    ``gc.wire_bytes(compiled, branch=2)`` counts that of number 2. While a step runs, there is a second copy of all candidates'
    states, because compilers copy what goes through a branch, and no exchange begins before the last gradient is there.
    For a choice that stays, build ``candidates[choice.name]`` alone, which costs nothing.

    Example:
        >>> candidates = {"dense": gc.dense(axis_name="data"), "topk": gc.topk_sgd(axis_name="data", density=0.01)}
        >>> tx = optax.chain(gc.switched(candidates), optax.sgd(0.1))
        >>> state = gc.set_choice(gc.init_state(params, tx, mesh), "topk")
        >>> int(gc.diagnostics(state)["switched/choice"])
        1

    Args:
        candidates: maps names to methods, exchanges or chains with one in them. All take the same per-device gradients and
            return updates that are equal on all workers, of the same shapes.

    Returns:
        A transformation of per-device gradients, with the updates of the candidate in use.

    Raises:
        ValueError: for no candidates; from ``init``, for one without an exchange, one whose replicas differ, and one that is
            switched itself; when traced, for candidates that return updates of other shapes or types than the first.
    """
    names = names_of(candidates)
    inside = [optax.with_extra_args_support(tx) for tx in candidates.values()]

    def init(params: PyTree) -> SwitchedState:
        inner = tuple(tx.init(params) for tx in inside)
        for name, state in zip(names, inner, strict=True):
            if not is_placeholder(params):
                _check(name, state)
        return SwitchedState(jnp.zeros((), jnp.int32), inner, names)

    def update(
        updates: PyTree, state: SwitchedState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, SwitchedState]:
        # Updates are closed over, so that an exchange sees where they come from.
        def run(number: int, inner: tuple) -> tuple[PyTree, tuple]:
            moved, own = inside[number].update(updates, inner[number], params, **extra)
            return moved, (*inner[:number], own, *inner[number + 1 :])

        branches = [lambda s, number=number: run(number, s) for number in range(len(inside))]
        try:
            moved, inner = jax.lax.switch(state.choice, branches, state.inner)
        except TypeError as error:
            if "branches must have equal output types" not in str(error):
                raise
            raise ValueError(
                f"the candidates {', '.join(names)} differ in the shapes or types of what they return: let all return whole"
                " updates, or all the shards of a ReduceScatter, and put nothing after an exchange that differs by worker"
            ) from error
        return moved, dataclasses.replace(state, inner=inner)

    return optax.GradientTransformationExtraArgs(init, only_of(SwitchedState, update))


def names_of(candidates: Mapping[str, optax.GradientTransformation]) -> tuple[str, ...]:
    """Returns the names of candidates, in their order.

    Raises:
        ValueError: if there are none.
    """
    if not candidates:
        raise ValueError(
            "candidates must not be empty: name at least one, such as {'dense': gradcomp_jax.dense(axis_name='data')}"
        )
    for name, method in candidates.items():
        if not (hasattr(method, "init") and hasattr(method, "update")):
            raise TypeError(
                f"candidate {name!r} must be a gradient transformation, such as gradcomp_jax.dense(axis_name='data'), got"
                f" {method!r}"
            )
    return tuple(candidates)


@_arguments.checked
def set_choice(state: Any, name: str) -> Any:
    """Returns a state in which another candidate of :func:`switched` is in use.

    Nothing is compiled again, and all memories stay. Call it outside ``jax.jit``, in every process with the same name;
    :func:`gradcomp_jax.check_equal_start` of the state finds a process that differs.

    Example:
        >>> candidates = {"dense": gc.dense(axis_name="data"), "topk": gc.topk_sgd(axis_name="data", density=0.01)}
        >>> state = gc.init_state(params, optax.chain(gc.switched(candidates), optax.sgd(0.1)), mesh)
        >>> int(gc.diagnostics(gc.set_choice(state, "topk"))["switched/choice"])
        1

    Args:
        state: a train state, or an optimizer's, with one of :func:`switched` in it.
        name: name of a candidate.

    Raises:
        ValueError: for an unknown name, and for a state without :func:`switched`.
    """
    if not nodes_of(state, is_switched):
        raise ValueError("nothing is switched in this state: put gradcomp_jax.switched(candidates) into the chain")

    def chosen(node: Any) -> Any:
        if not is_switched(node):
            return node
        number = node.names.index(_checks.one_of("name", name, node.names))
        # The sharding stays the same, so that the step is the same program.
        return dataclasses.replace(node, choice=jax.tree.map(lambda old: jnp.full_like(old, number), node.choice))

    return jax.tree.map(chosen, state, is_leaf=is_switched)


def is_switched(node: object) -> bool:
    """Returns whether a node of a state tree is a :class:`SwitchedState`, for ``is_leaf``."""
    return isinstance(node, SwitchedState)


def _check(name: str, state: Any) -> None:
    if nodes_of(state, is_switched):
        raise ValueError(f"the candidate {name!r} is switched itself: name all candidates in one")
    if nodes_within(state, lambda node: hasattr(node, "staleness")):
        raise ValueError(
            f"the replicas of the candidate {name!r} differ, and no update of another one fits them: put switched inside,"
            " such as gc.diloco(gc.switched(candidates), axis_name=...)"
        )
    if not nodes_within(state, lambda node: isinstance(node, ExchangeState)):
        raise ValueError(
            f"there is no exchange in the candidate {name!r}: put a gradcomp_jax.exchange or a method in it, such as"
            " gradcomp_jax.dense(axis_name=...)"
        )
