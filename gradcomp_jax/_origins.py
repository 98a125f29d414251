"""Finds whether a traced value was already summed over an axis, where its type does not say so.

Under ``pmap``, ``vmap`` and ``jax.shard_map`` with ``check_vma=False`` nothing tracks what differs by worker. There the
equations that a value comes from are read backwards, as long as they keep the value's entries: scalings, casts, clips, slices
and concatenations. What this ends at decides. An argument, a product of matrices or a loop is assumed to differ by worker.
"""

import enum
from typing import Any

import jax

from gradcomp_jax import _compat
from gradcomp_jax._specs import names_of
from gradcomp_jax._typing import AxisName

# What users do to a reduced gradient stays far below these limits; a value beyond them is assumed to differ by worker.
_BUDGET, _DEPTH = 20_000, 60

_SUMS = {"psum", "psum2", "psum_invariant", "pmax", "pmin"}
_GATHERS = {"all_gather", "all_gather_invariant", "all_gather_reduced"}
_CALLS = {
    "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call",
}  # fmt: skip
# They reduce the workers' gathered gradients to one; their result for anything else is no longer a gradient.
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min"}
# Each entry of the result is computed from the operands' entries at one position, or is one of their entries.
_KEEP = {
    "abs", "add", "add_any", "and", "cbrt", "ceil", "clamp", "concatenate", "convert_element_type", "copy", "copy_p", "cos",
    "div", "dynamic_slice", "dynamic_update_slice", "eq", "erf", "exp", "exp2", "expand_dims", "floor", "ge", "gt",
    "gradcomp_invarying", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne",
    "neg", "nextafter", "not", "optimization_barrier", "or", "pad", "pow", "pvary", "reduce_precision", "rem", "reshape",
    "rev", "round", "rsqrt", "select_n", "sign", "sin", "slice", "split", "sqrt", "square", "squeeze", "stop_gradient",
    "sub", "tan", "tanh", "transpose", "xor",
}  # fmt: skip
# Their indices say which entries are taken: a worker may take its own entries from a gathered array.
_PLACED = {"dynamic_slice", "dynamic_update_slice"}


class _Origin(enum.Enum):
    CONSTANT = 0
    SUMMED = 1
    GATHERED = 2
    OWN = 3


def is_reduced(values: list[Any], axis_name: AxisName) -> list[bool]:
    """Returns for each value whether it is certainly a sum, mean, maximum or gathering over the axis, and nothing else.

    Constants are not.
    """
    walk = _Walk(axis_name)
    try:
        return [walk.of(x) in (_Origin.SUMMED, _Origin.GATHERED) for x in values]
    except Exception:
        # Traced programs are internal to JAX and may change: a program that cannot be read must not stop training.
        return [False] * len(values)


class _Walk:
    def __init__(self, axis_name: AxisName) -> None:
        self._axis_name, self._names, self._left = axis_name, set(names_of(axis_name)), _BUDGET
        self._numbered = False
        self._known: dict[tuple[bool, int, int], _Origin] = {}
        # Each program is read once, and kept alive so that no other gets its id.
        self._programs: dict[tuple[bool, int, int], _Program] = {}

    def of(self, value: Any) -> _Origin:
        """Returns where a value of the current trace comes from."""
        mapped = _compat.is_mapped(value, self._axis_name)
        if mapped:
            return _Origin.OWN
        # Inside vmap, a sum over its axis becomes a sum over a numbered axis, and its result is not mapped.
        self._numbered = mapped is False
        return self._atom(value, None, 0)

    def _atom(self, atom: Any, inside: Any, depth: int) -> _Origin:
        """Returns the origin of an operand of an equation, in the program ``inside`` or, if None, in the current trace."""
        atom = _meant_by(atom)
        key = (self._numbered, id(inside), id(atom))
        if key not in self._known:
            self._left -= 1
            self._known[key] = _Origin.OWN if self._left < 0 or depth > _DEPTH else self._look(atom, inside, depth)
        return self._known[key]

    def _look(self, atom: Any, inside: Any, depth: int) -> _Origin:
        if _is_constant(atom):
            return _Origin.CONSTANT
        if inside is None:
            equation = _equation_of(atom)
            number = _number_of(atom, equation)
        else:
            if atom in inside.given:
                return inside.given[atom]
            equation, number = inside.made.get(atom, (None, 0))
        return _Origin.OWN if equation is None else self._equation(equation, number, inside, depth + 1)

    def _equation(self, equation: Any, number: int, inside: Any, depth: int) -> _Origin:
        if _is_of_a_derivative(equation):
            # Collectives inside a loss belong to the loss, and a gradient through them still differs by worker.
            return _Origin.OWN
        name, params, operands = equation.primitive.name, equation.params, list(equation.invars)
        if name in _SUMS or name in _GATHERS:
            over = params.get("axes", params.get("axis_name", ()))
            over = set(over) if isinstance(over, tuple | list | set | frozenset) else {over}
            if self._numbered and any(type(axis) is int for axis in over):
                return _Origin.SUMMED
            if params.get("axis_index_groups") is None and over & self._names:
                return _Origin.SUMMED if name in _SUMS else _Origin.GATHERED
            # A sum over other axes does not change the origin along this one.
            return self._atom(operands[number], inside, depth) if name in _SUMS else _Origin.OWN
        if name in _CALLS:
            return self._call(equation, number, inside, depth)
        if name in ("broadcast_in_dim", "iota"):
            # One number for all entries is a factor or a constant, not the gradient of a tensor.
            if not operands or (not operands[0].aval.shape and equation.outvars[number].aval.shape):
                return _Origin.CONSTANT
            return self._atom(operands[0], inside, depth)
        if name in _REDUCTIONS:
            found = self._atom(operands[0], inside, depth)
            return _Origin.SUMMED if found is _Origin.GATHERED else _Origin.OWN
        if name not in _KEEP:
            return _Origin.OWN
        if name == "optimization_barrier":
            operands = [operands[number]]
        if equation.outvars[number].aval.shape and name not in _PLACED:
            operands = [x for x in operands if x.aval.shape]
        return self._joined(operands, inside, depth)

    def _joined(self, operands: list[Any], inside: Any, depth: int) -> _Origin:
        """Returns the origin of what is computed entry by entry from some values."""
        found = set()
        for x in operands:
            if (origin := self._atom(x, inside, depth)) is _Origin.OWN:
                return origin
            found.add(origin)
        return next((origin for origin in (_Origin.SUMMED, _Origin.GATHERED) if origin in found), _Origin.CONSTANT)

    def _call(self, equation: Any, number: int, inside: Any, depth: int) -> _Origin:
        key = (self._numbered, id(inside), id(equation))
        if key not in self._programs:
            called = next((equation.params[k] for k in ("jaxpr", "call_jaxpr") if k in equation.params), None)
            jaxpr = getattr(called, "jaxpr", called)
            if jaxpr is None or len(jaxpr.invars) != len(equation.invars):
                return _Origin.OWN
            origins = [self._atom(x, inside, depth) for x in equation.invars]
            self._programs[key] = _Program(jaxpr, dict(zip(jaxpr.invars, origins, strict=True)))
        program = self._programs[key]
        return self._atom(program.results[number], program, depth)


class _Program:
    """Holds a program that another calls: where its inputs come from, and the equations that make its values."""

    def __init__(self, jaxpr: Any, given: dict[Any, _Origin]) -> None:
        self.results = jaxpr.outvars
        self.given = given | dict.fromkeys(jaxpr.constvars, _Origin.CONSTANT)
        self.made = {var: (equation, i) for equation in jaxpr.eqns for i, var in enumerate(equation.outvars)}


def _equation_of(x: Any) -> Any:
    """Returns the equation that a traced value comes from: ``primitive``, ``params``, ``invars``; ``None`` if unknown."""
    equation = getattr(x, "parent", None)
    return equation if all(hasattr(equation, name) for name in ("primitive", "params", "invars", "outvars")) else None


def _number_of(x: Any, equation: Any) -> int:
    """Returns which result of its equation a traced value is."""
    return next((i for i, var in enumerate(getattr(equation, "outvars", ())) if var is x.val), 0)


def _meant_by(x: Any) -> Any:
    """Returns the value of the surrounding program that a constant stands for; any other value is returned unchanged."""
    while _compat.is_traced(x) and hasattr(x, "parent") and not _compat.is_literal(x.val):
        held = getattr(getattr(x._trace, "frame", None), "constvar_to_val", {}).get(x.val)
        if held is None:
            break
        x = held
    return x


def _is_constant(x: Any) -> bool:
    """Returns whether an operand of a program is a number or an array that existed before the program was traced."""
    if _compat.is_literal(x) or not hasattr(x, "aval"):
        return True
    return hasattr(x, "parent") and _compat.is_literal(x.val) if _compat.is_traced(x) else isinstance(x, jax.Array)


def _is_of_a_derivative(equation: Any) -> bool:
    """Returns whether an equation belongs to a differentiated function or its derivative, as its name stack says."""
    stack = str(getattr(getattr(equation, "source_info", None), "name_stack", ""))
    return "jvp(" in stack or "transpose(" in stack
