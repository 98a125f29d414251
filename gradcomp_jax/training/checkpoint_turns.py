"""Lets one writer at a time write a checkpoint; a file says which folders beside the checkpoint belong to it."""

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator

from gradcomp_jax._files import lock_file
from gradcomp_jax.training.plain_paths import plain_name

NEW, OLD = ".gradcomp-new", ".gradcomp-old"
"""Suffixes of the new and the old checkpoint beside the path, while one replaces the other."""

_LOCK = ".gradcomp-lock"
_CLAIM = (
    b"What ends in .gradcomp-new and .gradcomp-old here is of a save by gradcomp_jax, which the next one clears away.\n"
)


def beside(path: pathlib.Path, suffix: str) -> pathlib.Path:
    """Returns the path beside a checkpoint with a suffix after its name."""
    return path.with_name(plain_name(path.name) + suffix)


def is_claimed(path: pathlib.Path) -> bool:
    """Returns whether a writer of a checkpoint left what lies beside it."""
    with contextlib.suppress(OSError):
        number = os.open(beside(path, _LOCK), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.read(number, len(_CLAIM) + 1) == _CLAIM
        finally:
            os.close(number)
    return False


def claim(path: pathlib.Path) -> None:
    """Marks, during a turn, what will lie beside a checkpoint as its writer's."""
    number = os.open(beside(path, _LOCK), os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.write(number, _CLAIM)
        os.fsync(number)
    finally:
        os.close(number)


@contextlib.contextmanager
def taken(path: pathlib.Path) -> Iterator[None]:
    """Holds the lock of a checkpoint: waits until other writers end, and then makes them wait.

    However a process ends, the operating system releases the lock. The file, beside the checkpoint, stays if a process is
    killed.
    """
    lock = beside(path, _LOCK)
    lock.parent.mkdir(parents=True, exist_ok=True)
    number = _acquired(lock)

    def leave() -> None:
        # What could not be removed is left to the next writer.
        if not any(os.path.lexists(beside(path, suffix)) for suffix in (NEW, OLD) if is_claimed(path)):
            lock.unlink(missing_ok=True)

    try:
        try:
            yield
        except Exception:
            leave()
            raise
        leave()
    finally:
        os.close(number)


def _acquired(lock: pathlib.Path) -> int:
    while True:
        try:
            number = lock_file(lock, wait=True)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EINVAL):
                raise _foreign(lock) from error
            raise
        try:
            if os.pread(number, len(_CLAIM) + 1, 0) not in (b"", _CLAIM):
                raise _foreign(lock)
            # The process that had the lock before may have deleted this file, and there may be another one.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(number), os.stat(lock, follow_symlinks=False)):
                    return number
        except BaseException:
            os.close(number)
            raise
        os.close(number)


def _foreign(lock: pathlib.Path) -> ValueError:
    return ValueError(f"{lock} is not of a save, and is left as it is: name another directory, or move it away by hand")
