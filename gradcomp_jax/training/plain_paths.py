"""Names that Orbax takes for something else: it looks for files by patterns, in which brackets and stars are no characters."""

import contextlib
import os
import pathlib
import re
import tempfile
import zlib
from collections.abc import Iterator

_SPECIAL = re.compile(r"[\[\]*?\\\ud800-\udfff]")


def is_plain(path: str | os.PathLike[str]) -> bool:
    """Returns whether Orbax takes a path as it is."""
    return _SPECIAL.search(os.fspath(path)) is None


def plain_name(name: str) -> str:
    """Returns a name like another one, and the same where Orbax takes that as it is."""
    if is_plain(name):
        return name
    return f"{_SPECIAL.sub('_', name)}-{zlib.crc32(name.encode(errors='surrogatepass')):08x}"


@contextlib.contextmanager
def reached(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives a path of a folder that Orbax takes as it is: its own, or else a link to it for a while.

    Raises:
        ValueError: if there is no place for the link.
    """
    if is_plain(folder):
        yield folder
        return
    if not is_plain(tempfile.gettempdir()):
        raise ValueError(
            f"Orbax takes brackets, stars and backslashes in {folder} for a pattern, and the folder for temporary files,"
            f" {tempfile.gettempdir()}, has them too: set TMPDIR to one without, or name another directory"
        )
    with tempfile.TemporaryDirectory(prefix="gradcomp-", ignore_cleanup_errors=True) as own:
        link = pathlib.Path(own) / "folder"
        link.symlink_to(folder, target_is_directory=True)
        try:
            yield link
        finally:
            link.unlink()
