"""Finds the collectives that carry per-device state, because a program pins a state replicated.

A value is followed through the program as long as it is only moved. An all-gather outside of every ``shard_map`` undoes what
compression saves if it reads per-device state of the arguments or makes per-device state of the results. An all-gather of
anything else, such as parameters (FSDP), is not counted here, whatever its shape.
"""

import re
from collections.abc import Iterable
from typing import Any

import jax

from gradcomp_jax.audit.collectives import base_opcode
from gradcomp_jax.audit.hlo import Computation, Instruction, Module
from gradcomp_jax.audit.syntax import parse_names
from gradcomp_jax.per_device import is_per_device

# Opcodes that pass on their first operand or a part of it, such as the second half of an asynchronous collective.
_MOVES = frozenset(
    (
        *("copy", "copy-done", "bitcast", "reshape", "transpose", "convert", "slice", "dynamic-slice", "opt-barrier"),
        *("all-gather-done", "async-done"),
    )
)
# Opcodes that run a whole computation once, and not for each entry of their operands.
_RUNS = frozenset(("fusion", "async"))
_STATE = ""

# For each element of a tuple (the key None for an array): the gathers that made it, and whether it is state.
_Origins = dict[int | None, frozenset[str]]


def residual_gathers(module: Module, in_tree: Any, out_tree: Any) -> frozenset[str]:
    """Returns the names of the all-gathers that carry per-device state.

    Args:
        module: the program.
        in_tree: the structure of its arguments, as ``jax.stages.Compiled`` has it.
        out_tree: the structure of its results.
    """
    read, made = dict(_kept(in_tree, skip=2)), [i for _, i in _kept(out_tree)]
    if not read and not made:
        return frozenset()
    given: dict[int, _Origins] = {}
    for instruction in module.entry.instructions.values():
        # A program leaves out arguments that it does not read, so the others are found by name.
        name = instruction.op_name.replace("\\'", "'")
        if instruction.opcode == "parameter" and any(
            re.sub(argument, "", name, count=1) in read for argument in (r"^\w+", r"^\w+\[[^\]]*\]")
        ):
            given[int(instruction.operands_text)] = {None: frozenset((_STATE,))}
    follower = _Follower(module)
    results = follower.run(module.entry, given)
    for i in made:
        follower.found |= results.get(i, frozenset())
    if None in results and made:
        follower.found |= results[None]
    return frozenset(follower.found - {_STATE})


def _kept(tree: Any, skip: int = 0) -> Iterable[tuple[str, int]]:
    """Yields the paths and places of per-device state.

    Gradients and replicas are left out, because a program may gather those to compute their mean.
    """
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    for path, node in jax.tree_util.tree_leaves_with_path(numbered, is_leaf=is_per_device):
        if is_per_device(node) and not node.lifted:
            for rest, place in jax.tree_util.tree_leaves_with_path(node):
                yield jax.tree_util.keystr((*path, *rest)[skip:]), place


class _Follower:
    def __init__(self, module: Module) -> None:
        self._module = module
        self.found: set[str] = set()

    def run(self, computation: Computation, given: dict[int, _Origins]) -> _Origins:
        """Follows the arguments of a computation, by parameter number, to its result."""
        held: dict[str, _Origins] = {}
        for name, instruction in computation.instructions.items():
            if instruction.opcode == "parameter":
                held[name] = given.get(int(instruction.operands_text), {})
            else:
                held[name] = self._passed_on(instruction, [held.get(n, {}) for n in instruction.operand_names])
        return held[computation.root.name]

    def _passed_on(self, instruction: Instruction, operands: list[_Origins]) -> _Origins:
        opcode = base_opcode(instruction)
        if opcode in _MOVES:
            return operands[0]
        if opcode == "tuple":
            return {i: origins[None] for i, origins in enumerate(operands) if None in origins}
        if opcode == "get-tuple-element":
            found = operands[0].get(int(instruction.attributes["index"]))
            return {None: found} if found else {}
        if opcode == "all-gather":
            return self._gathered(instruction, operands)
        if opcode == "while":
            (body,) = self._called(instruction, "body")
            after = self.run(body, {0: operands[0]})
            # What a loop carries instead of a state is the state in every iteration.
            for i, origins in operands[0].items():
                self.found |= after.get(i, frozenset()) if _STATE in origins else frozenset()
            return _either(operands[0], after)
        if opcode == "conditional":
            branches = self._called(instruction, "branch_computations", "true_computation", "false_computation")
            return _either(
                *(self.run(branch, {0: given}) for branch, given in zip(branches, operands[1:], strict=True))
            )
        if opcode == "call" or (opcode in _RUNS and any(operands)):
            return _either(
                *(
                    self.run(called, dict(enumerate(operands)))
                    for called in self._called(instruction, "calls", "to_apply")
                )
            )
        return {}

    def _gathered(self, instruction: Instruction, operands: list[_Origins]) -> _Origins:
        if "/shard_map/" in instruction.op_name:
            return {}
        origins = [operand.get(None, frozenset()) for operand in operands]
        if any(_STATE in found for found in origins):
            self.found.add(instruction.name)
        results = [found | {instruction.name} for found in origins]
        return {None: results[0]} if len(results) == 1 else dict(enumerate(results))

    def _called(self, instruction: Instruction, *keys: str) -> list[Computation]:
        names = (name for key in keys for name in parse_names(instruction.attributes.get(key, "")))
        return [self._module.computation(name) for name in names]


def _either(*branches: _Origins) -> _Origins:
    joined: _Origins = {}
    for branch in branches:
        for i, origins in branch.items():
            joined[i] = joined.get(i, frozenset()) | origins
    return joined
