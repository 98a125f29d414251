"""Prints the help of the command before any slow import.

Only the standard library is imported.
"""

import json
import pathlib
from collections.abc import Sequence

from gradcomp_jax import _process

PAGES = pathlib.Path(__file__).with_name("help.json")
"""Help pages by the name of the command; the empty name is for all commands. ``gradcomp_jax/cli/help_pages.py`` writes them."""
_ASKED = ("--help", "-h")


def answer_if_asked(words: Sequence[str]) -> None:
    """Prints a page of help and ends the process, if the command line asks for help only.

    Raises:
        SystemExit: after the page is printed.
    """
    if not 1 <= len(words) <= 2 or words[-1] not in _ASKED:
        return
    pages = json.loads(PAGES.read_text(encoding="utf-8"))
    name = words[0] if len(words) == 2 else ""
    if name in pages:
        _process.run(lambda: print(pages[name], end=""))
