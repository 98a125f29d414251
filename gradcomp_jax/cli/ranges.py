"""Ranges of numbers that are options: said by the help, and checked before a command begins."""

from collections.abc import Callable
from typing import Any

import typer

from gradcomp_jax._checks import Range

SEED = Range(0, 2**32 - 1)
"""As many seeds give different keys."""
SEEDS = Range(1, 1_000)
SECONDS = Range(1, 604_800, whole=False)
"""Up to a week."""
HEARTBEAT = Range(1, 86_400)
"""Up to a day."""
SENDERS = Range(2, 65_536)
"""One worker sends nothing."""
PROCESSES = Range(1, 65_536)
PROCESS = Range(0, PROCESSES.most - 1)
EVERY = Range(0, 1_000_000)
"""Steps; 0 for never."""
PLANNED = Range(1, 1_000_000)
"""Devices of a cluster that is only planned for."""


def number(allowed: Range, help: str, **more: Any) -> Any:
    """Makes an option of a number, whose help says the range, and which refuses what is outside of it."""
    return typer.Option(help=f"{help.removesuffix('.')}; {allowed}.", parser=_parser(allowed), **more)


def _parser(allowed: Range) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        try:
            found = int(value) if allowed.whole else float(value)
        except ValueError:
            found = None
        if found is None or found not in allowed:
            raise typer.BadParameter(f"must be {allowed}, got {value if found is None else found}")
        return found

    return parse


def unparsed(error: Any) -> str:
    """Returns the sentence on words that are no value of their option."""
    if error.param is None or not error.message:
        # An argument that is missing says so by its class.
        return str(error.format_message())
    return f"{error.param.opts[0]}{' ' if error.message.startswith('must be') else ': '}{error.message}"
