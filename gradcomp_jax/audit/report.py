"""What an audit finds: one row for each collective of a program."""

import dataclasses
from collections.abc import Container, Sequence
from typing import Any

_COLUMNS = ("kind", "dtype", "axis", "group", "count", "operand bytes", "sent", "received")
_LEFT = 3  # columns of words, aligned left; the others are numbers


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """Counts what one instruction moves of one element type.

    All byte counts are of one device and include every execution.

    Attributes:
        kind: ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all``,
            ``collective-permute``, ``collective-broadcast``, ``send``, ``recv``, or ``host-send``
            and ``host-recv`` for a transfer between a device and its host.
        dtype: HLO element type, ``bf16`` for instance.
        axis: names of the mesh axes that the groups run along, ``()`` for groups of one device;
            None without a mesh, or if the groups follow no axes of it.
        group_size: devices of the largest group.
        count: how often the instruction runs in one run of the program.
        operand_bytes: bytes that the device puts in.
        sent_bytes: bytes that it sends under the bandwidth-optimal algorithm.
        received_bytes: bytes that it receives.
        name: name of the HLO instruction.
        op_name: where it comes from in the user's program.
        groups: the groups, sorted; device numbers, or hardware ids across TPU slices.
        residuals: whether the instruction gathers per-device state, because the program pins a state replicated. HLO text does
            not show this: the value is then false.
        source: the source lines that led to it, such as ``/home/me/train.py:40``, the innermost first; JAX's own are left out.
            Of collectives that the compiler joined it is those of one. Empty where the text has none.
    """

    kind: str
    dtype: str
    axis: tuple[str, ...] | None
    group_size: int
    count: int
    operand_bytes: int
    sent_bytes: int
    received_bytes: int
    name: str
    op_name: str
    groups: tuple[tuple[int, ...], ...]
    residuals: bool = False
    source: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Conditional:
    """Describes a choice between branches, of which at least one communicates.

    Attributes:
        name: name of the HLO instruction.
        op_name: where it comes from in the user's program.
        count: how often the choice is made in one run of the program.
        sent: bytes that each branch sends when it is taken once.
        received: bytes that each branch receives when it is taken once.
        chosen: the branch that the report counts.
    """

    name: str
    op_name: str
    count: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    chosen: int


@dataclasses.dataclass(frozen=True)
class Totals:
    """Holds sums over rows, in bytes of one device."""

    count: int = 0
    operand: int = 0
    sent: int = 0
    received: int = 0

    def plus(self, row: CollectiveRow) -> "Totals":
        """Returns the sums with one more row."""
        return Totals(
            self.count + row.count,
            self.operand + row.operand_bytes,
            self.sent + row.sent_bytes,
            self.received + row.received_bytes,
        )


@dataclasses.dataclass(frozen=True)
class WireReport:
    """Holds the bytes that one device sends and receives in one run of a compiled program.

    Attributes:
        rows: one for each collective and element type, in the order of the program.
        conditionals: what the branches of each counted ``lax.cond`` or ``lax.switch`` would move.
        axes: the axes of the mesh that the rows were matched with; None without one.
    """

    rows: tuple[CollectiveRow, ...]
    conditionals: tuple[Conditional, ...] = ()
    axes: tuple[str, ...] | None = None

    @property
    def sent(self) -> int:
        """Returns the bytes that one device sends."""
        return sum(row.sent_bytes for row in self.rows)

    @property
    def received(self) -> int:
        """Returns the bytes that one device receives."""
        return sum(row.received_bytes for row in self.rows)

    @property
    def operand(self) -> int:
        """Returns the bytes that one device puts into its collectives."""
        return sum(row.operand_bytes for row in self.rows)

    def by(self, *fields: str) -> dict[Any, Totals]:
        """Sums the rows by fields: ``report.by("kind", "dtype")[("all-reduce", "f32")].sent``.

        Args:
            *fields: names of fields of :class:`CollectiveRow`.

        Returns:
            A dict from the value of the field, or the tuple of values of several fields, to the sums.

        Raises:
            ValueError: if a row has no such field, or none is named.
        """
        known = [field.name for field in dataclasses.fields(CollectiveRow)]
        unknown = [field for field in fields if field not in known]
        if unknown or not fields:
            raise ValueError(f"by() takes fields of a row, got {fields}; there are {known}")
        sums: dict[Any, Totals] = {}
        for row in self.rows:
            values = tuple(getattr(row, field) for field in fields)
            key = values if len(values) > 1 else values[0]
            sums[key] = sums.get(key, Totals()).plus(row)
        return sums

    def to_dict(self) -> dict[str, Any]:
        """Returns totals, rows and conditionals as plain values that JSON can hold."""
        return {
            "sent": self.sent,
            "received": self.received,
            "operand": self.operand,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "conditionals": [dataclasses.asdict(choice) for choice in self.conditionals],
        }

    def __str__(self) -> str:
        lines = _table(self) if self.rows else ["no bytes cross between devices"]
        for choice in self.conditionals:
            branches = ", ".join(f"{sent:,}" for sent in choice.sent)
            lines.append(f"{choice.name}: branches send {branches}; counted: {choice.chosen}")
        if crossing := self.crossing():
            lines.append(crossing)
        return "\n".join(lines)

    def crossing(self) -> str:
        """Returns a sentence on the residuals that cross, with the remedy; empty if none do."""
        found = self.by("residuals").get(True)
        return (
            ""
            if found is None
            else (
                f"residuals cross: {found.sent:,} of these bytes gather what each worker keeps for itself, because the"
                " program pins a state replicated; pin it by gradcomp_jax.state_shardings(state, mesh)"
            )
        )


def _table(report: WireReport) -> list[str]:
    """Formats the sums, the most expensive line first."""
    sums = report.by("kind", "dtype", "axis", "group_size")
    lines: list[tuple[str, ...]] = [_COLUMNS]
    for (kind, dtype, axis, size), s in sorted(sums.items(), key=lambda item: -item[1].sent):
        words = (kind, dtype, "-" if axis is None else ",".join(axis))
        lines.append((*words, *(f"{n:,}" for n in (size, s.count, s.operand, s.sent, s.received))))
    numbers = (sum(row.count for row in report.rows), report.operand, report.sent, report.received)
    lines.append(("total", "", "", "", *(f"{n:,}" for n in numbers)))
    return aligned(lines, range(_LEFT))


def aligned(lines: Sequence[Sequence[str]], words: Container[int]) -> list[str]:
    """Formats cells in columns, of which those with words are aligned left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if column in words else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
