"""The help of the command, printed before anything is imported that takes time.

Only the standard library is imported.
"""

import json
import pathlib
from collections.abc import Sequence

from gradcomp_jax import _process

PAGES = pathlib.Path(__file__).with_name("help.json")
"""By the name of the command, and nothing for that of all; written by ``gradcomp_jax/cli/help_pages.py``."""
_ASKED = ("--help", "-h")


def answer_if_asked(words: Sequence[str]) -> None:
    """Prints a page of help and ends the process, where the words of the command ask for nothing else.

    Raises:
        SystemExit: if they do.
    """
    if not 1 <= len(words) <= 2 or words[-1] not in _ASKED:
        return
    pages = json.loads(PAGES.read_text(encoding="utf-8"))
    name = words[0] if len(words) == 2 else ""
    if name in pages:
        _process.run(lambda: print(pages[name], end=""))
