"""What a transformation sends and keeps, traced for any number of workers without compiling anything."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _compat
from gradcomp_jax._costs import bytes_moved
from gradcomp_jax._specs import names_of
from gradcomp_jax._typing import PyTree
from gradcomp_jax.compressors import nbytes
from gradcomp_jax.core.context import with_context

_KINDS = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
    "reduce_scatter": "reduce-scatter",
}


class CollectiveTraffic(NamedTuple):
    """Holds the traffic of one kind of collective in a step.

    Attributes:
        kind: the kind, as :func:`gradcomp_jax.wire_bytes` names it.
        launches: number of collectives.
        sent: bytes that one device sends in all of them.
        operand: bytes that one device puts into all of them.
    """

    kind: str
    launches: int
    sent: float
    operand: float = 0


_Found: TypeAlias = tuple[tuple[str, ...], str, CollectiveTraffic]
"""Axes, element type, and a collective."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Holds what one worker sends in a step, and what it keeps.

    Attributes:
        collectives: the collectives, kind by kind.
        state: bytes that stay on each worker.
    """

    collectives: tuple[CollectiveTraffic, ...]
    state: float

    @property
    def sent(self) -> float:
        """Returns the bytes of all collectives."""
        return sum(c.sent for c in self.collectives)


def traffic_of(
    tx: optax.GradientTransformation, params: PyTree, workers: Mapping[str, int], *, between: str | None = None
) -> Traffic:
    """Describes one step of a transformation: its collectives as :func:`gradcomp_jax.wire_bytes` counts them, and its state.

    Where the program branches, the last branch counts: it is the one after a warm-up, and that of any platform but TPU. A loop
    that runs at most once counts once. Every exchange describes itself instead of compressing, so tracing time does not grow
    with its arithmetic.

    Args:
        tx: averages over the axes.
        params: arrays or ``ShapeDtypeStruct``.
        workers: sizes of the axes.
        between: counts only the collectives over this axis; all by default.

    Raises:
        ValueError: if a collective runs an unknown number of times.
    """
    tx = optax.with_extra_args_support(tx)

    def step(params: PyTree) -> PyTree:
        state = tx.init(params)
        tx.update(params, state, params, **with_context({}, describes=True))
        return state

    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.result_type(a)), params)
    traced, state = jax.make_jaxpr(step, axis_env=list(workers.items()), return_shape=True)(shapes)
    kinds: dict[str, CollectiveTraffic] = {}
    for names, _, collective in _collectives(traced.jaxpr, workers):
        if between is None or between in names:
            before = kinds.get(collective.kind, CollectiveTraffic(collective.kind, 0, 0))
            kinds[collective.kind] = CollectiveTraffic(
                collective.kind,
                before.launches + collective.launches,
                before.sent + collective.sent,
                before.operand + collective.operand,
            )
    return Traffic(tuple(kinds.values()), nbytes(state))


def _collectives(jaxpr: Any, sizes: Mapping[str, int]) -> Iterator[_Found]:
    """Yields the collectives of a traced program, one by one."""
    platform = {
        out for equation in jaxpr.eqns if equation.primitive.name == "platform_index" for out in equation.outvars
    }
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name in _KINDS:
            names = names_of(params["axes"] if "axes" in params else params["axis_name"])
            for operand in equation.invars:
                size = operand.aval.size * operand.aval.dtype.itemsize
                sent = bytes_moved(_KINDS[name], size, math.prod(sizes[n] for n in names))
                yield names, str(operand.aval.dtype), CollectiveTraffic(_KINDS[name], 1, sent, size)
            continue
        inside = params["branches"][-1:] if name == "cond" else params.values()
        bodies = [getattr(p, "jaxpr", p) for p in inside]
        found = [c for body in bodies if hasattr(body, "eqns") for c in _collectives(body, sizes)]
        if found and name == "while" and not _at_most_once(params):
            raise ValueError("a loop communicates, and the program does not tell how often it runs")
        if name == "cond" and equation.invars[0] in platform:
            found = _combined(found)
        yield from found * (params["length"] if name == "scan" else 1)


def _combined(found: list[_Found]) -> list[_Found]:
    """Counts all-reduces over the same axes as one: where they are separate for accelerators, the compilers combine them."""
    sums: dict[tuple[tuple[str, ...], str], CollectiveTraffic] = {}
    others = []
    for names, dtype, one in found:
        if one.kind == "all-reduce":
            before = sums.get((names, dtype), CollectiveTraffic(one.kind, 1, 0, 0))
            sums[names, dtype] = one._replace(sent=before.sent + one.sent, operand=before.operand + one.operand)
        else:
            others.append((names, dtype, one))
    return [*others, *((*key, one) for key, one in sums.items())]


def _at_most_once(loop: Mapping[str, Any]) -> bool:
    """Returns whether a loop runs while a boolean that it carries is true, and its body sets that boolean to a constant."""
    condition, body = loop["cond_jaxpr"].jaxpr, loop["body_jaxpr"].jaxpr
    carried = condition.invars[loop["cond_nconsts"] :]
    tested = condition.outvars[0]
    return tested in carried and _compat.is_literal(body.outvars[carried.index(tested)])
