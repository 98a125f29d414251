"""What a program may send, and where it does not keep to that."""

import dataclasses
import os
import re
from typing import Any

import jax.numpy as jnp

from gradcomp_jax._costs import KINDS
from gradcomp_jax._errors import known_name
from gradcomp_jax.audit.report import CollectiveRow, WireReport
from gradcomp_jax.audit.sources import own_line

SMALL = 1024
"""Bytes that a device puts into all collectives of one kind and element type, up to which both are free."""

WORDS = ("axis", "kind", "dtype", "breaks", "line")
"""Columns of :meth:`Limits.cells` that are not numbers."""

_HLO_TYPE = re.compile(r"pred|[su](?:1|2|4|8|16|32|64)|bf16|f(?:16|32|64)|f\d+e\d+m\d+\w*|c64|c128")
_JAX_TYPE = re.compile(r"(bfloat|float|uint|int|complex)(\d+\w*)")
_SHORT = {"bfloat": "bf", "float": "f", "uint": "u", "int": "s", "complex": "c"}
_KINDS = (*KINDS, "send", "recv", "host-send", "host-recv")
_LONGEST = 24  # characters of the groups of a collective whose axes are not known


def element_type(dtype: Any) -> str:
    """Returns the name that HLO has for a dtype of JAX; HLO's own names stay.

    Raises:
        ValueError: if it is neither.
    """
    if isinstance(dtype, str) and _HLO_TYPE.fullmatch(dtype):
        return dtype
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name == "bool":
        return "pred"
    # Short names of NumPy are refused: its f8 is float64, and its u8 is uint64.
    if (match := _JAX_TYPE.fullmatch(name)) is None:
        raise ValueError(f"unknown dtype {dtype!r}: write it as JAX does, bfloat16, or as HLO does, bf16")
    return _SHORT[match[1]] + match[2].replace("_", "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Holds what is expected of the collectives of a program. What is None is free.

    Attributes:
        axis: axes of the mesh. Collectives along one of them, alone or with others, are looked at; all of them if None. One
            whose groups follow no axes may run along any.
        at_most: bytes that one device sends in all of them.
        dtypes: element types that they have, as HLO names them.
        kinds: their kinds.
    """

    axis: tuple[str, ...] | None = None
    at_most: float | None = None
    dtypes: frozenset[str] | None = None
    kinds: frozenset[str] | None = None

    @classmethod
    def of(cls, *, axis: Any, at_most: float | None, dtypes: Any, kinds: Any) -> "Limits":
        """Makes them of one name or several, of dtypes as JAX or HLO names them.

        Raises:
            ValueError: for a kind or a dtype that no collective has, or a number of bytes below 0.
        """
        if at_most is not None and not at_most >= 0:
            raise ValueError(f"at_most must be bytes, at least 0, got {at_most!r}")
        return cls(
            axis=None if axis is None else _several(axis),
            at_most=at_most,
            dtypes=None if dtypes is None else frozenset(map(element_type, _several(dtypes))),
            kinds=None if kinds is None else frozenset(known_name("kind", kind, _KINDS) for kind in _several(kinds)),
        )

    def concerned(self, report: WireReport) -> list[CollectiveRow]:
        """Returns the rows that run along the axes and move something.

        Raises:
            ValueError: if the report does not say along which axes its rows run, or its mesh has no such axis.
        """
        moving = [row for row in report.rows if row.sent_bytes or row.received_bytes]
        if self.axis is None:
            return moving
        if report.axes is None:
            raise ValueError(
                f"the program does not say where {self.axis[0]!r} is: give the mesh that it was compiled for"
            )
        along = {known_name("axis of the mesh", name, report.axes) for name in self.axis}
        return [row for row in moving if row.axis is None or along & set(row.axis)]

    def breaks(self, report: WireReport) -> dict[CollectiveRow, str]:
        """Returns the rows that are not as expected, with what it is in which they differ."""
        rows, found = self.concerned(report), dict[CollectiveRow, str]()
        amounts: dict[tuple[str, str], float] = {}
        for row in rows:
            # As of one turn: a loop that averages its loss in each is no reason for an alarm.
            amount = (row.operand_bytes or row.received_bytes) / row.count
            amounts[row.kind, row.dtype] = amounts.get((row.kind, row.dtype), 0) + amount
        for row in rows:
            large = amounts[row.kind, row.dtype] > SMALL
            words = {
                "residuals": row.residuals,
                "dtype": self.dtypes is not None and row.dtype not in self.dtypes and large,
                "kind": self.kinds is not None and row.kind not in self.kinds and large,
            }
            if any(words.values()):
                found[row] = ", ".join(word for word, broken in words.items() if broken)
        return found

    def faults(self, report: WireReport) -> list[str]:
        """Returns a sentence for each limit that the program breaks."""
        broken, sentences = self.breaks(report), []
        for word, allowed in (("dtype", self.dtypes), ("kind", self.kinds)):
            rows = [row for row, words in broken.items() if word in words.split(", ")]
            if rows and allowed is not None:
                there = ", ".join(sorted({getattr(row, word) for row in rows}))
                sent = sum(row.sent_bytes for row in rows)
                sentences.append(f"{word} {there}: {sent:,} bytes; expected {' or '.join(sorted(allowed))}")
        sent = sum(row.sent_bytes for row in self.concerned(report))
        if self.at_most is not None and sent > self.at_most:
            along = f" along {', '.join(self.axis)}" if self.axis else ""
            sentences.append(f"one device sends {sent:,} bytes{along}; expected at most {self.at_most:,.0f}")
        if any(row.residuals for row in broken):
            sentences.append(report.crossing())
        return sentences

    def cells(self, report: WireReport) -> list[dict[str, str]]:
        """Returns the table of the collectives that are looked at, by column, the most expensive line first."""
        broken, sums = self.breaks(report), dict[tuple[str, str, str, str, str, str], list[int]]()
        for row in self.concerned(report):
            line = own_line(row.source).removeprefix(os.getcwd() + os.sep)
            key = (_along(row), row.kind, row.dtype, f"{row.group_size:,}", broken.get(row, ""), line or "-")
            amounts = sums.setdefault(key, [0, 0])
            amounts[0] += row.count
            amounts[1] += row.sent_bytes
        rows = []
        for key, (count, sent) in sorted(sums.items(), key=lambda item: -item[1][1]):
            axis, kind, dtype, size, breaks, line = key
            cells = {"axis": axis, "kind": kind, "dtype": dtype, "devices": size, "count": f"{count:,}"}
            rows.append(cells | {"bytes sent": f"{sent:,}", "breaks": breaks, "line": line})
        return rows if broken else [{k: v for k, v in row.items() if k != "breaks"} for row in rows]


def _several(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, (tuple, list, set, frozenset)) else (given,)


def _along(row: CollectiveRow) -> str:
    """Returns the axes of a row, or its groups where they are not known."""
    if row.axis is not None:
        return ", ".join(row.axis)
    groups = ", ".join("{" + ",".join(map(str, group)) + "}" for group in row.groups)
    return groups if len(groups) <= _LONGEST else f"{groups[:_LONGEST]}..."
