"""HLO text as light objects: a module of computations of instructions.

Only what an audit needs is read. Shapes, operands and attributes stay text until someone asks,
because programs have many thousands of instructions and few of them communicate.
"""

import dataclasses
import functools
import re

from gradcomp_jax.audit.shapes import ArrayShape, parse_shape
from gradcomp_jax.audit.sources import Sources
from gradcomp_jax.audit.syntax import closing, parse_attributes, split_commas

# The printer puts these marks into long tuples.
_INDEX_COMMENT = re.compile(r"/\*index=\d+\*/")
_INSTRUCTION = re.compile(r"\s*(ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*)", re.DOTALL)
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_COMPUTATION = re.compile(r"\s*(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*")
# A computation that another core runs, a TPU's sparse core for instance, says so where it ends.
_END = re.compile(r"\s*\}(?:, execution_thread=\"[^\"]*\")?\s*(?://.*)?")
# So far the lines of an instruction are looked for.
_STEPS = 5
_OPERAND_NAME = re.compile(r"%?([\w.\-]+)$")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """Holds one instruction."""

    name: str
    opcode: str
    shape_text: str
    operands_text: str
    attributes_text: str
    is_root: bool

    @functools.cached_property
    def shapes(self) -> tuple[ArrayShape, ...]:
        """Returns the arrays of the result, tuples flattened."""
        return parse_shape(self.shape_text)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Returns the operands as written: a name, which older text writes after its shape."""
        return tuple(split_commas(self.operands_text))

    @functools.cached_property
    def operand_names(self) -> tuple[str, ...]:
        """Returns the names of the operands."""
        found = (_OPERAND_NAME.search(operand) for operand in self.operands)
        return tuple(match[1] if match else "" for match in found)

    @functools.cached_property
    def attributes(self) -> dict[str, str]:
        """Returns the ``key=value`` pairs after the operands."""
        return parse_attributes(self.attributes_text)

    @functools.cached_property
    def frontend_attributes(self) -> dict[str, str]:
        """Returns the pairs inside ``frontend_attributes={...}``."""
        return parse_attributes(self.attributes.get("frontend_attributes", "{}")[1:-1])

    @property
    def metadata(self) -> str:
        """Returns what the text says of the user's program, with braces around it."""
        return self.attributes.get("metadata", "{}")

    @property
    def op_name(self) -> str:
        """Returns where the instruction comes from in the user's program, or an empty string."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.metadata)
        return match[1] if match else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """Holds a named list of instructions."""

    name: str
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """Returns the instruction whose value the computation returns."""
        for instruction in self.instructions.values():
            if instruction.is_root:
                return instruction
        # Hand-written text may leave ROOT out: the root is then the last instruction.
        return list(self.instructions.values())[-1]

    @functools.cached_property
    def readers(self) -> dict[str, list[Instruction]]:
        """Returns the instructions that read each value, by its name."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for name in instruction.operand_names:
                found.setdefault(name, []).append(instruction)
        return found

    def operand_shapes(self, instruction: Instruction) -> tuple[ArrayShape, ...]:
        """Returns the arrays that an instruction of this computation reads, tuples flattened.

        Raises:
            ValueError: if an operand is neither defined here nor written with its shape.
        """
        arrays: list[ArrayShape] = []
        for name, written in zip(instruction.operand_names, instruction.operands, strict=True):
            source = self.instructions.get(name)
            shapes = source.shapes if source else parse_shape(written)
            if source is None and not shapes:
                raise ValueError(f"operand {written!r} of {instruction.name} is not defined")
            arrays.extend(shapes)
        return tuple(arrays)


@dataclasses.dataclass(frozen=True)
class Module:
    """Holds a program: its computations, and how many devices run it."""

    computations: dict[str, Computation]
    entry: Computation
    replica_count: int
    num_partitions: int
    sources: Sources

    @functools.cached_property
    def by_opcode(self) -> dict[str, list[Instruction]]:
        """Returns every instruction of the module, by opcode."""
        found: dict[str, list[Instruction]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                found.setdefault(instruction.opcode, []).append(instruction)
        return found

    @property
    def device_count(self) -> int:
        """Returns the number of devices that run the program."""
        return self.replica_count * self.num_partitions

    def source_of(self, instruction: Instruction, computation: Computation) -> tuple[str, ...]:
        """Returns the source lines that led to an instruction of a computation, the innermost first.

        One that the compiler put in the place of another has none of its own, so they are those of what reads it, after at most
        a few others, or of what it reads.
        """
        if not self.sources.known:
            return ()
        steps = (
            lambda one: computation.readers.get(one.name, ()),
            lambda one: filter(None, map(computation.instructions.get, one.operand_names)),
        )
        for step in steps:
            level = {instruction.name: instruction}
            for _ in range(_STEPS):
                for one in level.values():
                    if found := self.sources.of(one.metadata):
                        return found
                # By their names: what is read along two ways is looked at once.
                level = {following.name: following for one in level.values() for following in step(one)}
        return ()

    def computation(self, name: str) -> Computation:
        """Looks up a computation by its name.

        Raises:
            ValueError: if the text does not define it.
        """
        if name not in self.computations:
            raise ValueError(f"the HLO text calls computation {name!r} but does not define it")
        return self.computations[name]


def parse_module(text: str) -> Module:
    """Reads the text of one HLO module.

    Raises:
        ValueError: if the text is not one HLO module with an ENTRY computation.
    """
    headers = re.findall(r"^\s*HloModule\b.*", text, re.MULTILINE)
    if len(headers) > 1:
        raise ValueError(f"the text holds {len(headers)} HLO modules: pass them one by one")
    computations: dict[str, Computation] = {}
    entry, current = None, None
    for raw in text.splitlines():
        if current is None:
            # Tables of file names and stack frames lie between the header and the computations.
            header = _COMPUTATION.fullmatch(raw)
            if header and not raw.lstrip().startswith("HloModule"):
                current = Computation(header[2], {})
                computations[current.name] = current
                entry = current if header[1] else entry
        elif _END.fullmatch(raw):
            current = None
        elif (instruction := _parse_instruction(raw)) is not None:
            current.instructions[instruction.name] = instruction
    if entry is None or not entry.instructions:
        raise ValueError(
            "no ENTRY computation found: pass a compiled program, jax.jit(f).lower(...).compile(), "
            "or the HLO text that its as_text() returns"
        )
    header_text = headers[0] if headers else ""
    return Module(
        computations=computations,
        entry=entry,
        replica_count=_header_int(header_text, "replica_count"),
        num_partitions=_header_int(header_text, "num_partitions"),
        sources=Sources(text),
    )


def _parse_instruction(raw: str) -> Instruction | None:
    """Reads ``ROOT %name = shape opcode(operands), attributes``; returns None for any other text."""
    line = _INDEX_COMMENT.sub("", raw)
    match = _INSTRUCTION.fullmatch(line)
    if match is None:
        return None
    rest = match[3]
    # A tuple's shape has spaces, an array's has none.
    end = closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, end) if end > 0 else None
    if opcode is None:
        raise ValueError(f"cannot read the HLO instruction {raw.strip()[:120]!r}")
    begin = opcode.end() - 1
    if opcode[1] in ("constant", "parameter"):
        # A constant may continue over several lines; nothing after its value matters here.
        stop = rest.find(")", begin)
        stop = len(rest) if stop < 0 else stop
    else:
        stop = closing(rest, begin)
    return Instruction(
        name=match[2],
        opcode=opcode[1],
        shape_text=rest[:end],
        operands_text=rest[begin + 1 : stop],
        attributes_text=rest[stop + 1 :],
        is_root=match[1] is not None,
    )


def _header_int(header: str, key: str) -> int:
    match = re.search(rf"\b{key}=(\d+)", header)
    return int(match[1]) if match else 1
