"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, align: str) -> list[str]:
    """Returns the lines of a table; ``align`` has ``l`` or ``r`` for each column; its last letter holds for the others."""
    sides = align.ljust(len(header), align[-1])
    rule = ["---:" if side == "r" else "---" for side in sides]
    lines = [_line(header), f"|{'|'.join(rule)}|"]
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"a row has {len(row)} cells, expected {len(header)}: {row}")
        lines.append(_line(row))
    return lines


def figure(value: float) -> str:
    """Returns a number with three digits, or as a whole number from a thousand up: ``1.38``, ``1,380``."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def _line(cells: Iterable[object]) -> str:
    return "|" + "".join(f" {cell} |" if str(cell) else " |" for cell in cells)
