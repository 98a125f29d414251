"""The ``gradcomp`` command.

Only the standard library is imported here, so that a missing extra is one clear sentence.
"""

import importlib.util
import json
import pathlib
import shlex
import sys
from collections.abc import Sequence

from gradcomp_jax import _process

PAGES = pathlib.Path(__file__).with_name("help.json")
"""Help by the name of the command, which ``benchmarks/help_pages.py`` writes: to print it nothing slow need be imported."""

_NEEDED = ("typer", "rich", "matplotlib", "quantiphy")


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line and exits.

    Exit codes are 0 when done, 2 for a user error, 3 for a program that breaks an audit's limits, 1 where stdout could not be
    written or another process was lost, 130 and 143 where SIGINT or SIGTERM stopped it.
    """
    words = list(sys.argv[1:] if args is None else args)
    # What follows takes seconds: the command is stopped cleanly from here on, and help need not wait for it.
    _process.take_over()
    answer_if_asked(words)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"gradcomp: the command line needs {', '.join(missing)}: pip install -e '.[cli]' in a checkout",
            file=sys.stderr,
        )
        raise SystemExit(2)

    def command() -> None:
        import gradcomp_jax._public  # noqa: F401
        from gradcomp_jax.cli.app import app

        app(words, prog_name="gradcomp", obj=shlex.join(["gradcomp", *words]))

    _process.run(command)


def help_of(name: str) -> str | None:
    """Returns the help of a command, of all commands for an empty name; ``None`` if there is no such command."""
    return json.loads(PAGES.read_text(encoding="utf-8")).get(name)


def answer_if_asked(words: Sequence[str]) -> None:
    """Prints a page and ends the process, if the command line asks for help only."""
    if len(words) in (1, 2) and words[-1] in ("--help", "-h") and (page := help_of("".join(words[:-1]))):
        _process.run(lambda: print(page, end=""))
