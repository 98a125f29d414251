"""Writes files so that they appear whole: under an unguessable name in the same folder, and then renamed."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import re
import secrets
import stat
import warnings
from typing import Any

from gradcomp_jax._errors import SettingError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/+")
_DRAFT = re.compile(r"\.[0-9a-f]{16}\.new")
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_OLD_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def write_whole(path: str | os.PathLike[str], content: bytes | str, *, follow: bool = True) -> None:
    """Writes a file so that its path has, at every moment, all of the earlier content or all of the new content.

    A file that is replaced keeps its mode. If writing fails, nothing is left behind. A process that is killed meanwhile leaves
    a file that :func:`is_draft` recognises.

    Args:
        path: path of the file. Its folder must exist.
        content: text is written as UTF-8.
        follow: whether to follow a link, as for a path that a user typed: its target is replaced, and the link stays. A path
            that is not a file, such as ``/dev/stdout``, is written to. If false, as for names that a program chooses, a link is
            replaced and its target is not changed.
    """
    place, data = os.path.abspath(path), content.encode() if isinstance(content, str) else content
    before = _status(place, follow)
    is_file = before is not None and stat.S_ISREG(before.st_mode)
    if follow:
        if (before is not None and not is_file) or place.startswith(("/dev/", "/proc/")):
            with open(place, "wb") as file:
                file.write(data)
            return
        place = os.path.realpath(place)
    elif before is not None and not is_file and not stat.S_ISLNK(before.st_mode):
        raise FileExistsError(errno.EEXIST, "There is something that is not a file", place)
    if is_file and not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), place)
    folder, name = os.path.split(place)
    # A long name has no room for a suffix.
    draft = os.path.join(folder, f"{name[:50]}.{secrets.token_hex(8)}.new")
    number = os.open(draft, _NEW_FILE, 0o666)
    try:
        with open(number, "wb") as file:
            if before is not None and is_file:
                os.fchmod(number, stat.S_IMODE(before.st_mode))
            file.write(data)
            file.flush()
            os.fsync(number)
        os.replace(draft, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def local_folder(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the absolute path of a folder of the file system."""
    text = os.fspath(path)
    if _URL.match(text):
        raise SettingError(
            f"{text} is a URL, and this reads and writes folders of a file system: pass a folder, such as one where the bucket"
            " is mounted, or save with orbax.checkpoint.CheckpointManager, which takes URLs, and"
            " custom_metadata=gradcomp_jax.checkpoint_metadata(state)"
        )
    return pathlib.Path(os.path.abspath(text))


def is_draft(name: str, of: str) -> bool:
    """Returns whether a name is that of a draft of a file, which :func:`write_whole` has not renamed."""
    return name.startswith(of) and _DRAFT.fullmatch(name, len(of)) is not None


def read_file(path: str | os.PathLike[str], *, limit: int, follow: bool = False) -> bytes | None:
    """Returns the content of a file, or ``None`` if there is no file. Never waits, and holds at most ``limit`` bytes.

    Args:
        path: path of the file.
        limit: the most bytes that the file may have.
        follow: whether to follow a link, as for a path that a user typed.
    """
    try:
        number = os.open(path, _OLD_FILE & ~os.O_NOFOLLOW if follow else _OLD_FILE)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "This is not a file", os.fspath(path))
        with open(number, "rb", closefd=False) as file:
            # Files that the system makes up while they are read, such as those of /proc, have size 0.
            content = file.read(limit + 1) if found.st_size <= limit else b""
        if max(found.st_size, len(content)) > limit:
            raise OSError(errno.EFBIG, f"This has more than {limit} bytes", os.fspath(path))
        return content
    finally:
        os.close(number)


def lock_file(path: str | os.PathLike[str], *, wait: bool) -> int:
    """Opens a file and locks it, and returns its descriptor. Closing that, or the end of the process, releases the lock.

    Raises:
        BlockingIOError: if another process has the lock, unless this shall ``wait``.
        OSError: if there can be no such file, or something else has its path.
    """
    number = os.open(path, _LOCK_FILE, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "This is not a file", os.fspath(path))
        try:
            fcntl.flock(number, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            folder = os.path.dirname(os.fspath(path))
            warnings.warn(f"{folder} is on a file system without locks: write there one at a time", stacklevel=3)
    except BaseException:
        os.close(number)
        raise
    return number


def read_json(path: str | os.PathLike[str], *, limit: int = 1 << 24) -> Any:
    """Returns the content of a JSON file that a user has named."""
    content = read_file(path, limit=limit, follow=True)
    if content is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError(f"{os.fspath(path)} is no JSON that is read here: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} is no JSON: {error}") from error


def _status(path: str, follow: bool) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=follow)
    except FileNotFoundError:
        return None
