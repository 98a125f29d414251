"""Tables on a terminal, of which columns that do not fit are left out, and named; and files of results."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from gradcomp_jax._errors import SettingError
from gradcomp_jax._files import write_whole


@dataclasses.dataclass(frozen=True)
class Columns:
    """A table before it is known how wide the terminal is.

    Attributes:
      rows: cells by column, all with the same columns; the first column is text and always shown.
      dropped_first: columns in the order in which they are left out; those that are not named stay.
      left: columns that are text, beside the first.
    """

    rows: Sequence[Mapping[str, str]]
    dropped_first: Sequence[str]
    left: Sequence[str] = ()


def tell(console: Console, text: str, style: str = "", *, wrapped: bool = False) -> None:
    """Prints a sentence: broken into lines on a terminal, in one line for a file or a pipe unless that shall be ``wrapped``."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=not (wrapped or console.is_terminal))


def fit(columns: Columns, width: int) -> tuple[Table, list[str]]:
    """Returns the table of the columns that ``width`` characters hold, and the names of the others."""
    names = list(columns.rows[0])
    dropped = []
    for name in columns.dropped_first:
        if needed(columns, names) <= width:
            break
        if name in names:
            names.remove(name)
            dropped.append(name)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in names:
        text = name == names[0] or name in columns.left
        table.add_column(name, justify="left" if text else "right", no_wrap=True)
    for row in columns.rows:
        table.add_row(*(row[name] for name in names))
    return table, [name for name in columns.rows[0] if name in dropped]


def print_table(console: Console, columns: Columns, elsewhere: str) -> None:
    """Prints a table, and below it what a narrow terminal left out, and where all is; a file or a pipe gets all of it."""
    if not console.is_terminal:
        whole = needed(columns, list(columns.rows[0]))
        Console(file=console.file, width=whole).print(fit(columns, whole)[0])
        return
    table, dropped = fit(columns, console.width)
    console.print(table)
    if dropped:
        names = ", ".join(" ".join(name.split()) for name in dropped)
        whole = needed(columns, list(columns.rows[0]))
        left_out = f"left out, the terminal is {console.width} characters wide: {names}"
        tell(console, f"{left_out} ({whole} show all, as do pipes and files; {elsewhere})", "dim")


def write_result(console: Console, path: pathlib.Path, content: str | bytes, *, follow: bool = False) -> None:
    """Writes a file whole, in a new folder where there is none, and says so; ``follow`` is that of :func:`write_whole`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content, follow=follow)
    except OSError as error:
        raise SettingError(f"cannot write the results that are printed above: {error}") from error
    tell(console, f"wrote {path}")


def needed(columns: Columns, names: Sequence[str]) -> int:
    """Returns how many characters wide a table of some columns is."""
    # Each has a space after it, and there is one between two.
    cells = ([name, *(row[name] for row in columns.rows)] for name in names)
    return sum(max(len(line) for cell in column for line in cell.split("\n")) + 2 for column in cells) - 1
