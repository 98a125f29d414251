"""What a compiled program moves over a device's memory: bytes of every instruction, as often as it runs, and its cycles.

``cost_analysis()["bytes accessed"]`` is another number. It counts a loop's body once, and an array that stays in a TPU's vector
memory for every read and write. Here a loop counts with its trips, and an array only where it lies in main memory, with the
padding of its tiles.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator

from gradcomp_jax.audit.collectives import KINDS, base_opcode, is_later_half
from gradcomp_jax.audit.hlo import Computation, Instruction, Module, parse_module
from gradcomp_jax.audit.loops import runs_at_most_once, trip_count
from gradcomp_jax.audit.shapes import bits_of
from gradcomp_jax.audit.syntax import parse_names

MOVE_NOTHING = (
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier", "partition-id",
    "replica-id", "domain", "add-dependency",
)  # fmt: skip
_CUTS = ("slice", "dynamic-slice", "gather")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^{}]*)\})?")
_CYCLES = re.compile(r'"estimated_cycles"\s*:\s*"?(\d+)')
Size = Callable[["Placed"], int]
_SMALL = 4096
"""Bytes up to which an operation outside of a fusion is one on scalars, which no kernel is launched for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """An array with its place.

    Attributes:
      entries: bytes of its entries.
      bytes: that it takes, padding of its tiles included.
      main: whether it lies in main memory. On TPU other spaces are those of the core.
    """

    entries: int
    bytes: int
    main: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """What an instruction costs, as often as it runs.

    Attributes:
      name: of the instruction.
      opcode: of the instruction.
      kind: ``kernel``, ``copy`` beside kernels, or ``collective``.
      times: how often it runs.
      read: bytes from main memory, of all runs.
      written: likewise.
      touched: bytes of its operands and results, wherever they lie, of all runs.
      cycles: that the compiler expects of all runs; ``None`` where it says nothing.
      scalar: whether it is one on scalars.
      source: lines of the library that it comes from, the innermost first, such as ``kernels/rows.py:40``.
    """

    name: str
    opcode: str
    kind: str
    times: int
    read: int
    written: int
    touched: int
    cycles: int | None
    scalar: bool
    source: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """What a program moves, collectives left out.

    Attributes:
      costs: of its instructions.
    """

    costs: tuple[Cost, ...]

    @property
    def bytes(self) -> int:
        """Returns the bytes read from main memory and written to it."""
        return sum(cost.read + cost.written for cost in self.costs if cost.kind != "collective")

    @property
    def launches(self) -> int:
        """Returns how many kernels run, those of loops as often as they do."""
        return sum(cost.times for cost in self.costs if cost.kind == "kernel" and not cost.scalar)

    def seconds(self, *, clock: float, bandwidth: float) -> float:
        """Returns the time of the kernels, one after the other: estimated, not measured.

        Args:
          clock: cycles a second.
          bandwidth: of main memory, bytes a second. Kernels without an estimate of the compiler take what they touch over it.
        """
        kernels = [cost for cost in self.costs if cost.kind == "kernel" and not cost.scalar]
        known = sum(cost.cycles for cost in kernels if cost.cycles is not None)
        return known / clock + sum(cost.touched for cost in kernels if cost.cycles is None) / bandwidth

    def by_source(self, depth: int = 1) -> dict[tuple[str, ...], int]:
        """Returns the bytes by the lines that they come from, the most first."""
        found = collections.Counter[tuple[str, ...]]()
        for cost in self.costs:
            found[cost.source[:depth]] += cost.read + cost.written
        return dict(found.most_common())


def traffic(text: str) -> Traffic:
    """Reads an optimized program.

    Of a conditional the branch counts that moves most.

    Args:
      text: of one HLO module, as ``compiled.as_text()`` returns it.

    Raises:
      ValueError: for a loop whose number of trips the text does not say.
    """
    module = parse_module(text)
    return Traffic(tuple(_Reader(module).costs(module.entry, 1)))


@functools.lru_cache(maxsize=65536)
def placed(text: str) -> tuple[Placed, ...]:
    """Reads a shape with its layout, flattening tuples: ``bf16[8,100]{1,0:T(8,128)(2,1)S(1)}`` takes 2,048 bytes of a core."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        sizes = [int(size.strip().removeprefix("<=")) for size in dims.split(",") if size.strip()]
        bits, order = bits_of(dtype), layout.partition(":")[0]
        minor_first = [int(place) for place in order.split(",") if place.strip()] or list(range(len(sizes)))[::-1]
        padded = [sizes[place] for place in minor_first]
        if tile := re.search(r"T\(([\d,]+)\)", layout):
            # The first tile alone: those after it order entries within it.
            tiles = [int(size) for size in tile[1].split(",")][::-1]
            padded += [1] * (len(tiles) - len(padded))
            padded[: len(tiles)] = [-(-n // t) * t for n, t in zip(padded, tiles, strict=False)]
        space = re.search(r"S\((\d+)\)", layout)
        entries, filled = (-(-math.prod(n) * bits // 8) for n in (sizes, padded))
        found.append(Placed(entries, filled, space is None or space[1] == "0"))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads the costs of computations."""

    module: Module

    def costs(self, computation: Computation, times: int) -> Iterator[Cost]:
        for instruction in computation.instructions.values():
            opcode, attributes = instruction.opcode, instruction.attributes
            if opcode in MOVE_NOTHING or is_later_half(instruction):
                continue
            if opcode == "while":
                yield from self.costs(self._called(attributes["body"]), times * self._trips(instruction, computation))
            elif opcode == "conditional":
                names = parse_names(
                    attributes.get("branch_computations")
                    or f"{attributes['true_computation']}, {attributes['false_computation']}"
                )
                branches = [list(self.costs(self._called(name), times)) for name in names]
                yield from max(branches, key=lambda costs: sum(cost.read + cost.written for cost in costs))
            elif opcode == "call":
                yield from self.costs(self._called(attributes["to_apply"]), times)
            elif attributes.get("custom_call_target") != "AllocateBuffer":
                yield self._cost(instruction, computation, times)

    def _called(self, name: str) -> Computation:
        return self.module.computation(name.lstrip("%"))

    def _trips(self, loop: Instruction, computation: Computation) -> int:
        trips = trip_count(loop, computation, self.module)
        if trips is None and runs_at_most_once(loop, self.module):
            trips = 1
        if trips is None:
            raise ValueError(f"the text does not say how often {loop.name} runs")
        return trips

    def _cost(self, instruction: Instruction, computation: Computation, times: int) -> Cost:
        kind, opcode = "kernel", base_opcode(instruction)
        if instruction.opcode == "async-start":
            # The computation that it calls has one instruction, which says what is moved.
            computation = self._called(instruction.attributes["calls"])
            opcode = base_opcode(computation.root)
        if opcode in KINDS:
            kind = "collective"
        elif instruction.opcode == "copy-start" or (opcode in _CUTS and instruction.opcode.endswith("-start")):
            kind = "copy"
        moved = computation.root if instruction.opcode == "async-start" else instruction
        read, written = self._amounts(moved, computation, lambda array: array.bytes if array.main else 0)
        touched = sum(self._amounts(moved, computation, lambda array: array.bytes))
        cycles = _CYCLES.search(instruction.attributes.get("backend_config", ""))
        arrays = (*placed(moved.shape_text), *(a for one in _operands(moved, computation) for a in one))
        return Cost(
            name=instruction.name,
            opcode=opcode,
            kind=kind,
            times=times,
            read=times * read,
            written=times * written,
            touched=times * touched,
            cycles=None if cycles is None else times * int(cycles[1]),
            scalar=max((a.bytes for a in arrays), default=0) <= _SMALL and opcode not in ("fusion", "custom-call"),
            source=tuple(
                line.rpartition("gradcomp_jax/")[2]
                for line in self.module.sources.of(instruction.metadata)
                if "gradcomp_jax/" in line
            ),
        )

    def _amounts(self, instruction: Instruction, computation: Computation, size: Size) -> tuple[int, int]:
        """Bytes read and written, of the arrays that ``size`` counts."""
        opcode, operands = base_opcode(instruction), _operands(instruction, computation)
        results = list(placed(instruction.shape_text))
        if instruction.opcode.endswith("-start"):
            # Until the end of it a tuple: of the operands and the results, and what the hardware waits for.
            count = sum(map(len, operands))
            first = 0 if instruction.opcode == "copy-start" else count if len(results) > count else 0
            results = results[first : first + max(1, count)] if opcode in KINDS else results[first : first + 1]
        if opcode == "fusion":
            return self._fusion(instruction, computation, size)
        if opcode == "dynamic-update-slice":
            update = operands[1][0]
            return size(update), update.entries if size(results[0]) else 0
        if opcode in _CUTS:
            return min(size(operands[0][0]), results[0].entries), sum(map(size, results))
        return sum(size(array) for one in operands for array in one), sum(map(size, results))

    def _fusion(self, instruction: Instruction, computation: Computation, size: Size) -> tuple[int, int]:
        """Of what a fusion only cuts it reads the cuts; of what it updates in place it writes the update."""
        body = self._called(instruction.attributes["calls"])
        users: dict[str, list[tuple[Instruction, int]]] = collections.defaultdict(list)
        for user in body.instructions.values():
            for place, name in enumerate(user.operand_names):
                users[name].append((user, place))
        parameters = {p.operands_text: p.name for p in body.instructions.values() if p.opcode == "parameter"}
        read = 0
        for number, arrays in enumerate(_operands(instruction, computation)):
            whole = sum(map(size, arrays))
            cuts = _cuts(parameters[str(number)], users) if len(arrays) == 1 else math.inf
            read += whole if cuts == math.inf else min(whole, int(cuts))
        root, written = body.root, 0
        roots = [root] if root.opcode != "tuple" else [body.instructions[name] for name in root.operand_names]
        for result, one in zip(placed(instruction.shape_text), roots, strict=False):
            update = _updated_in_place(one, body)
            written += size(result) if update is None or not size(result) else update.entries
        return read, written


def _operands(instruction: Instruction, computation: Computation) -> list[tuple[Placed, ...]]:
    """The arrays of each operand."""
    found = []
    for name, written in zip(instruction.operand_names, instruction.operands, strict=True):
        source = computation.instructions.get(name)
        found.append(placed(source.shape_text if source else written))
    return found


def _cuts(name: str, users: dict[str, list[tuple[Instruction, int]]]) -> float:
    """Bytes of a fusion's operand that are used: those of its cuts, or infinity if something reads all of it."""
    total, names, seen = 0, [name], set()
    while names:
        current = names.pop()
        for user, place in users[current] if current not in seen else ():
            if user.opcode == "bitcast" or (user.opcode == "pad" and place == 0):
                names.append(user.name)
            elif user.opcode in _CUTS and place == 0:
                total += placed(user.shape_text)[0].entries
            elif not (user.opcode == "dynamic-update-slice" and place == 0):
                return math.inf
        seen.add(current)
    return total


def _updated_in_place(root: Instruction, body: Computation) -> Placed | None:
    """The update, if a fusion's result is an operand with a part replaced."""
    root = _through(root, body)
    if root.opcode != "dynamic-update-slice":
        return None
    base, update = (body.instructions[name] for name in root.operand_names[:2])
    return placed(update.shape_text)[0] if _through(base, body).opcode == "parameter" else None


def _through(instruction: Instruction, body: Computation) -> Instruction:
    while instruction.opcode in ("bitcast", "copy"):
        instruction = body.instructions[instruction.operand_names[0]]
    return instruction
