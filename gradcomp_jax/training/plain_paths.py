"""Replaces names that Orbax misreads: it looks for files by patterns, in which brackets and stars have another meaning."""

import contextlib
import os
import pathlib
import re
import tempfile
import zlib
from collections.abc import Iterator

_SPECIAL = re.compile(r"[\[\]*?\\\ud800-\udfff]")


def is_plain(path: str | os.PathLike[str]) -> bool:
    """Returns whether Orbax takes a path literally."""
    return _SPECIAL.search(os.fspath(path)) is None


def plain_name(name: str) -> str:
    """Returns a name that Orbax takes literally: the given one if possible, otherwise a similar one."""
    if is_plain(name):
        return name
    return f"{_SPECIAL.sub('_', name)}-{zlib.crc32(name.encode(errors='surrogatepass')):08x}"


@contextlib.contextmanager
def reached(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path of a folder that Orbax takes literally: its own, or a temporary link to it."""
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
