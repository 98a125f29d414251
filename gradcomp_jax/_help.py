"""The help of the command, printed before anything is imported that takes time.

Only the standard library is imported.
"""

import json
import pathlib
import sys

from gradcomp_jax import _process

PAGES = pathlib.Path(__file__).with_name("cli") / "help.json"
"""By the name of the command, and nothing for that of all; written by ``gradcomp_jax/cli/help_pages.py``."""
_ASKED = ("--help", "-h")


def answer_if_asked() -> None:
    """Prints a page of help and ends the process, where it is the command and its words ask for nothing else.

    Raises:
        SystemExit: if they do.
    """
    if not _process.is_command() or not 1 <= len(words := sys.argv[1:]) <= 2 or words[-1] not in _ASKED:
        return
    pages = json.loads(PAGES.read_text(encoding="utf-8"))
    name = words[0] if len(words) == 2 else ""
    if name in pages:
        _process.run(lambda: print(pages[name], end=""))
