"""A narrow terminal leaves out columns and says which; a pipe gets all."""

import dataclasses
import io
import re

import pytest

pytest.importorskip("rich")

from rich.console import Console

from gradcomp_jax.cli import method_table
from gradcomp_jax.cli.tables import Columns, fit, print_table

ROWS = [("dgc", "1 ms", "12 MB", "a\nlonger one"), ("dense", "1.5 s", "9", "")]
TABLE = Columns(
    [dict(zip(("method", "step", "sent", "note"), row, strict=True)) for row in ROWS],
    dropped_first=("note", "sent"),
    left=("note",),
)


def printed(width: int, *, terminal: bool, table: Columns = TABLE) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal)
    print_table(console, table, "plan.json has all")
    return re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())


@pytest.mark.parametrize(
    ("width", "dropped"), [(80, []), (33, []), (32, ["note"]), (21, ["note"]), (20, ["sent", "note"])]
)
def test_columns_go_in_their_order_and_only_as_many_as_must(width: int, dropped: list[str]) -> None:
    # Columns of 6, 5, 5 and 10 characters, a space after each, and one between two.
    table, found = fit(TABLE, width)
    assert found == dropped
    assert [column.header for column in table.columns] == [n for n in TABLE.rows[0] if n not in dropped]


def test_a_column_that_is_not_there_is_not_left_out() -> None:
    """As those of prices, in a narrow terminal, where there are none."""
    assert fit(dataclasses.replace(TABLE, dropped_first=("price", "note")), 20)[1] == ["note"]


def test_what_is_left_out_is_named() -> None:
    text = printed(21, terminal=True)
    assert "left out, the terminal is 21 characters wide: note (33 show all" in " ".join(text.split())
    assert "longer" not in text and "plan.json has all" in " ".join(text.split())
    assert "left out" not in printed(33, terminal=True)


def test_a_pipe_gets_every_column_on_one_line_a_row() -> None:
    text = printed(10, terminal=False)
    assert "left out" not in text
    assert any(line.split() == ["dense", "1.5", "s", "9"] for line in text.splitlines())
    assert "longer one" in text


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_methods_fit_or_say_what_does_not(width: int) -> None:
    lines = printed(width, terminal=True, table=method_table.columns(8)).splitlines()
    assert all(len(line) <= width for line in lines)
    assert ("left out" in "\n".join(lines)) == (width < 200)
