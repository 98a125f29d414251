"""In which order a forward pass uses its parameters, read from its program."""

from collections.abc import Callable
from typing import Any

import jax

from gradcomp_jax import _compat
from gradcomp_jax._typing import PyTree
from gradcomp_jax.transforms.policies import path_name


def forward_order(loss: Callable[..., Any], params: PyTree, *args: Any, **kwargs: Any) -> tuple[str, ...]:
    """Paths of the parameters in the order in which ``loss(params, *args)`` first computes with them.

    What is done to a parameter alone (a cast, a reshape, a scale) does not count as a use. A parameter that is never used
    comes last. Nothing is computed.

    Args:
        loss: as for ``jax.value_and_grad``.
        params: arrays or shapes.
        *args: likewise.
        **kwargs: likewise.
    """
    closed = jax.make_jaxpr(lambda p, a, k: loss(p, *a, **k))(params, args, kwargs)
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    found: list[int] = []
    aliases = {var: number for number, var in enumerate(closed.jaxpr.invars[: len(names)])}
    _read(closed.jaxpr, aliases, found)
    rest = [number for number in range(len(names)) if number not in found]
    return tuple(names[number] for number in [*found, *rest])


def _read(jaxpr: Any, aliases: dict[Any, int], found: list[int]) -> None:
    """Appends the parameters' numbers as they are used; ``aliases`` are the variables made of one parameter alone."""
    for equation in jaxpr.eqns:
        operands = [v for v in equation.invars if not _compat.is_literal(v)]
        used = [aliases[v] for v in operands if v in aliases]
        if not used:
            continue
        inner = next((p for p in map(_body, equation.params.values()) if p is not None), None)
        if inner is not None and len(inner.invars) == len(equation.invars):
            pairs = zip(inner.invars, equation.invars, strict=True)
            inside = {a: aliases[b] for a, b in pairs if not _compat.is_literal(b) and b in aliases}
            _read(inner, inside, found)
            for outer, result in zip(equation.outvars, inner.outvars, strict=False):
                if not _compat.is_literal(result) and result in inside:
                    aliases[outer] = inside[result]
        elif len(set(used)) == 1 and len(used) == len(operands):
            aliases.update(dict.fromkeys(equation.outvars, used[0]))
        else:
            found.extend(number for number in dict.fromkeys(used) if number not in found)


def _body(parameter: Any) -> Any:
    """The program inside an equation, of a jitted or rematerialised function for instance."""
    inner = getattr(parameter, "jaxpr", parameter)
    return inner if hasattr(inner, "eqns") else None
