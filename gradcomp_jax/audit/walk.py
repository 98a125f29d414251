"""The walk through a program: how often each collective runs, and which branches count."""

import dataclasses
from typing import Literal

from gradcomp_jax._costs import bytes_moved
from gradcomp_jax.audit.axes import MeshAxes
from gradcomp_jax.audit.collectives import Transfer, base_opcode, is_later_half, transfer_of
from gradcomp_jax.audit.hlo import Computation, Instruction, Module
from gradcomp_jax.audit.loops import runs_at_most_once, trip_count
from gradcomp_jax.audit.report import CollectiveRow, Conditional, WireReport
from gradcomp_jax.audit.syntax import parse_names

# Attributes that name computations which run once for each run of the instruction.
_CALLS = ("calls", "to_apply", "called_computations")
_SUMS = ("count", "operand_bytes", "sent_bytes", "received_bytes")


@dataclasses.dataclass(frozen=True)
class Found(WireReport):
    """Holds what one run of a part of the program moves."""

    rows: tuple[CollectiveRow, ...] = ()

    def __add__(self, other: "Found") -> "Found":
        return Found(self.rows + other.rows, self.conditionals + other.conditionals)

    def times(self, n: int) -> "Found":
        """Returns what ``n`` runs move."""
        if n == 0:
            return Found()
        return Found(
            tuple(_summed(row, times=n) for row in self.rows),
            tuple(dataclasses.replace(c, count=c.count * n) for c in self.conditionals),
        )


class Walker:
    """Adds up what a program moves, starting at its entry.

    ``loop_trips`` is how often a loop runs if the text does not say; ``residuals`` names what carries per-device state.
    """

    def __init__(
        self,
        module: Module,
        branch: Literal["max", "min"] | int,
        loop_trips: int | None,
        axes: MeshAxes | None,
        residuals: frozenset[str] = frozenset(),
    ):
        self._module = module
        self._branch = branch
        self._loop_trips = loop_trips
        self._axes = axes
        self._residuals = residuals
        self._found: dict[str, Found] = {}

    def report(self) -> WireReport:
        """Walks the program and adds up its collectives.

        Raises:
            ValueError: if an instruction or a loop cannot be counted.
        """
        found = self._computation(self._module.entry)
        return WireReport(_merged(found.rows), found.conditionals, None if self._axes is None else self._axes.names)

    def _computation(self, computation: Computation) -> Found:
        if computation.name not in self._found:
            found = Found()
            for instruction in computation.instructions.values():
                found += self._instruction(instruction, computation)
            self._found[computation.name] = found
        return self._found[computation.name]

    def _instruction(self, instruction: Instruction, computation: Computation) -> Found:
        opcode = base_opcode(instruction)
        if opcode == "while":
            return self._while(instruction, computation)
        if opcode == "conditional":
            return self._conditional(instruction, computation)
        transfer = transfer_of(instruction, computation, self._module)
        if transfer is not None:
            return Found(self._rows(instruction, transfer, self._module.source_of(instruction, computation)))
        if is_later_half(instruction):
            return Found()
        found = Found()
        for name in _called(instruction, _CALLS):
            found += self._computation(self._module.computation(name))
        return found

    def _rows(self, instruction: Instruction, transfer: Transfer, source: tuple[str, ...]) -> tuple[CollectiveRow, ...]:
        axis = None
        if self._axes is not None:
            axis = self._axes.along(
                transfer.groups,
                hardware_ids=transfer.hardware_ids,
                fill=transfer.kind not in ("collective-permute", "send", "recv"),
            )
        rows = []
        for dtype, operand in transfer.by_dtype.items():
            moved = bytes_moved(transfer.kind, operand, transfer.group_size)
            rows.append(
                CollectiveRow(
                    kind=transfer.kind,
                    dtype=dtype,
                    axis=axis,
                    group_size=transfer.group_size,
                    count=1,
                    operand_bytes=operand if transfer.sends else 0,
                    sent_bytes=moved if transfer.sends else 0,
                    received_bytes=moved if transfer.receives else 0,
                    name=instruction.name,
                    op_name=instruction.op_name,
                    groups=transfer.groups,
                    source=source,
                    residuals=instruction.name in self._residuals,
                )
            )
        return tuple(rows)

    def _while(self, loop: Instruction, computation: Computation) -> Found:
        body, condition = (
            self._computation(self._module.computation(loop.attributes[key].lstrip("%")))
            for key in ("body", "condition")
        )
        if not body.rows and not condition.rows:
            return Found()
        if not condition.rows and runs_at_most_once(loop, self._module):
            return self._one_of(loop, [Found(), body])
        trips = trip_count(loop, computation, self._module)
        trips = self._loop_trips if trips is None else trips
        if trips is None:
            raise ValueError(
                f"the loop {loop.name} ({loop.op_name or 'no op_name'}) communicates, and the "
                "program does not tell how often it runs: pass trip_count="
            )
        # The condition is tested once more than the body runs.
        return body.times(trips) + condition.times(trips + 1)

    def _conditional(self, instruction: Instruction, computation: Computation) -> Found:
        # A conditional on a truth value names the true branch first; lax.cond numbers it 1.
        names = _called(instruction, ("branch_computations",)) or _called(
            instruction, ("false_computation", "true_computation")
        )
        branches = [self._computation(self._module.computation(name)) for name in names]
        return self._one_of(instruction, branches)

    def _one_of(self, instruction: Instruction, branches: list[Found]) -> Found:
        if not any(branch.rows for branch in branches):
            return Found()
        chosen = self._choose(branches)
        choice = Conditional(
            name=instruction.name,
            op_name=instruction.op_name,
            count=1,
            sent=tuple(branch.sent for branch in branches),
            received=tuple(branch.received for branch in branches),
            chosen=chosen,
        )
        return branches[chosen] + Found(conditionals=(choice,))

    def _choose(self, branches: list[Found]) -> int:
        if isinstance(self._branch, int) and -len(branches) <= self._branch < len(branches):
            return self._branch % len(branches)
        pick = min if self._branch == "min" else max
        return pick(range(len(branches)), key=lambda i: (branches[i].sent, branches[i].received))


def _called(instruction: Instruction, keys: tuple[str, ...]) -> list[str]:
    """Returns the computations that an instruction names under some attributes."""
    return [name for key in keys for name in parse_names(instruction.attributes.get(key, ""))]


def _summed(*rows: CollectiveRow, times: int = 1) -> CollectiveRow:
    """Returns the last row with the sums of all rows, multiplied by ``times``."""
    return dataclasses.replace(rows[-1], **{field: times * sum(getattr(row, field) for row in rows) for field in _SUMS})


def _merged(rows: tuple[CollectiveRow, ...]) -> tuple[CollectiveRow, ...]:
    """Joins the rows of an instruction whose computation is called from several places."""
    merged: dict[tuple[str, str], CollectiveRow] = {}
    for row in rows:
        key = (row.name, row.dtype)
        if (earlier := merged.get(key)) is not None:
            row = _summed(earlier, row)
        merged[key] = row
    return tuple(merged.values())
