"""How often a while loop runs, when the program says so.

CPU and GPU write the count next to the loop. TPU does not, but a scan there still counts from one
constant to another, and that is read here. A loop that continues while a carried value is true, and
whose body sets this value to false, runs at most once. The count of any other loop is unknown.
"""

import dataclasses
import re

from gradcomp_jax.audit.hlo import Computation, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count"\s*:\s*\{\s*"n"\s*:\s*"?(\d+)"?\s*\}')
# The value passes through these unchanged.
_TRANSPARENT = ("copy", "bitcast", "copy-start", "copy-done", "optimization-barrier")


@dataclasses.dataclass(frozen=True)
class _Value:
    """Describes an integer: a constant, or ``element`` of the computation's parameter, plus ``offset``."""

    element: int | None
    offset: int


def trip_count(loop: Instruction, computation: Computation, module: Module) -> int | None:
    """Returns how often the body of ``loop``, a ``while`` of ``computation``, runs, or None if the text does not say."""
    if known := _KNOWN.search(loop.attributes.get("backend_config", "")):
        return int(known[1])
    body = module.computation(loop.attributes["body"].lstrip("%"))
    condition = module.computation(loop.attributes["condition"].lstrip("%"))
    test = condition.root
    direction = test.attributes.get("direction")
    if test.opcode != "compare" or direction not in ("LT", "LE"):
        return None
    counter, limit = (_trace(condition, name) for name in test.operand_names)
    if counter is None or counter.element is None or counter.offset or limit is None:
        return None
    before = _tuple_element(computation, loop.operand_names[0], counter.element)
    after = _tuple_element(body, body.root.name, counter.element)
    end = limit.offset
    if limit.element is not None:
        # The loop carries the limit too: it must enter as a constant and never change.
        carried = _tuple_element(computation, loop.operand_names[0], limit.element)
        kept = _tuple_element(body, body.root.name, limit.element)
        if carried is None or carried.element is not None or kept != _Value(limit.element, 0):
            return None
        end += carried.offset
    if before is None or before.element is not None or after is None:
        return None
    if after.element != counter.element or after.offset < 1:
        return None
    steps = end - before.offset + (direction == "LE")
    return max(0, -(-steps // after.offset))


def runs_at_most_once(loop: Instruction, module: Module) -> bool:
    """Returns whether a ``while`` continues as long as a boolean that it carries is true, and its body sets it to false."""
    body = module.computation(loop.attributes["body"].lstrip("%"))
    condition = module.computation(loop.attributes["condition"].lstrip("%"))
    tested = _trace(condition, condition.root.name)
    if tested is None or tested.element is None or not condition.root.shape_text.startswith("pred"):
        return False
    return _tuple_element(body, body.root.name, tested.element) == _Value(None, 0)


def _tuple_element(computation: Computation, name: str, index: int) -> _Value | None:
    """Traces an element of a tuple that a computation builds."""
    built = _through(computation, name)
    if built is None or built.opcode != "tuple" or index >= len(built.operand_names):
        return None
    return _trace(computation, built.operand_names[index])


def _through(computation: Computation, name: str) -> Instruction | None:
    """Follows a name back through instructions that do not change the value."""
    instruction = computation.instructions.get(name)
    while instruction is not None and instruction.opcode in _TRANSPARENT:
        instruction = computation.instructions.get(instruction.operand_names[0])
    return instruction


def _trace(computation: Computation, name: str) -> _Value | None:
    """Traces an integer back to a constant or to the parameter; returns None for anything else."""
    instruction = _through(computation, name)
    if instruction is None:
        return None
    if instruction.opcode == "constant":
        text = instruction.operands_text.strip().replace("false", "0")
        return _Value(None, int(text)) if re.fullmatch(r"-?\d+", text) else None
    if instruction.opcode == "get-tuple-element":
        source = _through(computation, instruction.operand_names[0])
        index = int(instruction.attributes["index"])
        if source is not None and source.opcode == "parameter":
            return _Value(index, 0)
        return _tuple_element(computation, instruction.operand_names[0], index)
    if instruction.opcode == "add":
        a, b = (_trace(computation, operand) for operand in instruction.operand_names)
        if a is None or b is None or (a.element is not None and b.element is not None):
            return None
        return _Value(b.element if a.element is None else a.element, a.offset + b.offset)
    return None
