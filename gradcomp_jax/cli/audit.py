"""``gradcomp audit``: what a compiled program sends between devices, and whether that is what was expected."""

import pathlib
import re
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

from gradcomp_jax._checks import Range
from gradcomp_jax._errors import SettingError, users_code
from gradcomp_jax.audit import wire_bytes
from gradcomp_jax.audit.axes import mesh_of
from gradcomp_jax.audit.limits import WORDS, Limits
from gradcomp_jax.cli import ranges, units
from gradcomp_jax.cli.own_code import imported
from gradcomp_jax.cli.tables import Columns, print_table, tell
from gradcomp_jax.cli.user_errors import user_errors

_SCHEDULED = re.compile(r"^HloModule .*is_scheduled=true", re.MULTILINE)
"""What a compiler says of a program that it is done with."""
BROKEN = 3
"""Exit code where a program sends something else than was expected."""


def audit_command(
    program: Annotated[
        str,
        typer.Argument(
            metavar="PROGRAM",
            help="A file of HLO text, as compiled.as_text() returns it and --xla_dump_to writes it, or MODULE:FUNCTION: a"
            " function that returns a compiled program, a lowered one, or a jitted function and a tuple of its arguments.",
        ),
    ],
    dtypes: Annotated[
        str | None,
        typer.Option("--expect-dtype", help="Dtypes that may cross, with commas between: bf16, or bfloat16."),
    ] = None,
    kinds: Annotated[
        str | None,
        typer.Option("--expect-kind", help="Kinds of collectives that there may be: all-reduce,all-gather."),
    ] = None,
    axes: Annotated[
        str | None,
        typer.Option(
            "--on", help="Axes of the mesh: only collectives along one of them are looked at.", show_default="all"
        ),
    ] = None,
    at_most: Annotated[
        str | None, typer.Option(help="Bytes that one device may send in one run of the program: 12MB.")
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Axes and their sizes, in order: data=4,model=2.",
            show_default="that of the program's arguments or results",
        ),
    ] = None,
    trip_count: Annotated[
        int | None,
        ranges.number(Range(0, 10**9), "Turns of a loop of which the program does not say how often it runs."),
    ] = None,
) -> None:
    """Count the bytes that a compiled program sends, of any library, and compare them with what is expected.

    Every collective is a line: its axis, kind, dtype and bytes, and the source line that made it. The exit code is 0 if all is
    as expected, and 3 if it is not. Where a device puts at most 1 KiB into all collectives of one kind and dtype, such as the
    mean of a loss, these two are free.
    """
    with user_errors():
        size = None if at_most is None else units.size("--at-most", at_most)
        compiled = _text(program) if _is_file(program) else _compiled(program)
        try:
            limits = Limits.of(axis=_names(axes), at_most=size, dtypes=_names(dtypes), kinds=_names(kinds))
            given = mesh_of(compiled) if mesh is None else _mesh(mesh)
            report = wire_bytes(compiled, mesh=given, trip_count=trip_count)
            faults, rows = limits.faults(report), limits.cells(report)
        except ValueError as error:
            # How an option says what an argument would.
            text = str(error).replace("pass trip_count=", "pass --trip-count")
            raise SettingError(f"{program}: {text.replace('give the mesh', 'give --mesh, the mesh')}") from error
        console = Console()
        if rows:
            print_table(console, Columns(rows, ("devices", "count"), WORDS), "gc.wire_bytes has all")
        total = sum(row.sent_bytes for row in limits.concerned(report))
        tell(console, f"one device sends {total:,} bytes")
        for note in _notes(compiled, report.axes is None and bool(rows)):
            tell(console, note, "dim")
        for fault in faults:
            tell(console, f"not as expected: {fault}")
        if faults:
            raise typer.Exit(BROKEN)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def _mesh(text: str) -> jax.sharding.AbstractMesh:
    """Reads ``data=4,model=2``."""
    pairs = [part.partition("=") for part in text.split(",")]
    names, sizes = [name.strip() for name, _, _ in pairs], [size.strip() for _, _, size in pairs]
    if not all(names) or not all(size.isdecimal() and int(size) > 0 for size in sizes) or len(set(names)) < len(names):
        raise SettingError(f"--mesh must be axes and their sizes, such as data=4,model=2, got {text!r}")
    return jax.sharding.AbstractMesh(tuple(map(int, sizes)), tuple(names))


def _is_file(program: str) -> bool:
    return ":" not in program or pathlib.Path(program).is_file()


def _text(program: str) -> str:
    try:
        return pathlib.Path(program).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SettingError(f"{program} is no text: dump HLO with --xla_dump_hlo_as_text") from error
    except OSError as error:
        raise SettingError(
            f"cannot read {program}: {error.strerror}; a function of yours is MODULE:FUNCTION, such as my_step:compiled"
        ) from error


def _compiled(source: str) -> Any:
    """Returns the compiled program that a name in a user's module leads to."""
    found = imported(source, "PROGRAM")
    with users_code(source, getattr(getattr(found, "__code__", None), "co_filename", None)):
        if not hasattr(found, "as_text") and callable(found) and not hasattr(found, "lower"):
            found = found()
        if isinstance(found, tuple) and len(found) == 2 and hasattr(found[0], "lower"):
            function, arguments = found
            found = function.lower(*(arguments if isinstance(arguments, tuple) else (arguments,)))
        if hasattr(found, "compile"):
            found = found.compile()
    # Equinox wraps a compiled program.
    found = getattr(found, "compiled", found)
    if not hasattr(found, "as_text"):
        raise SettingError(
            f"{source} must return a compiled program, a lowered one, or a jitted function and a tuple of its arguments,"
            f" got a {type(found).__name__}"
        )
    return found


def _notes(compiled: Any, unnamed: bool) -> list[str]:
    notes = []
    if unnamed:
        notes.append(
            "The program does not name its axes: devices that exchange stand in their place. --mesh names them."
        )
    if isinstance(compiled, str) and not _SCHEDULED.search(compiled):
        notes.append(
            "The text is not of a program that is ready to run: collectives that the compiler adds or changes are not in it."
            " Of a dump take the file after_optimizations."
        )
    return notes
