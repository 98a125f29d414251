"""The folder of a checkpoint: where its arrays are, who may write it, and how a new checkpoint replaces it."""

import contextlib
import errno
import os
import pathlib
import re
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any

from gradcomp_jax import _everyone
from gradcomp_jax._files import lock_file, read_file
from gradcomp_jax.training.checkpoint_parts import TREE, delete, is_checkpoint, others
from gradcomp_jax.training.checkpoint_record import FILE

NEW, OLD = ".gradcomp-new", ".gradcomp-old"
"""Suffixes of the new and the old checkpoint beside the path, while one replaces the other."""

_LOCK = ".gradcomp-lock"
_CLAIM = (
    b"What ends in .gradcomp-new and .gradcomp-old here is of a save by gradcomp_jax, which the next one clears away.\n"
)
_AWAY = "is left as it is: name another directory, or move it away by hand"

_SPECIAL = re.compile(r"[\[\]*?\\\ud800-\udfff]")
"""Orbax looks for files by patterns, in which these have another meaning."""


def is_plain(path: str | os.PathLike[str]) -> bool:
    """Returns whether Orbax takes a path literally."""
    return _SPECIAL.search(os.fspath(path)) is None


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


def beside(path: pathlib.Path, suffix: str) -> pathlib.Path:
    """Returns the path beside a checkpoint with a suffix after its name, or after a similar one that Orbax takes literally."""
    name = path.name
    if not is_plain(name):
        name = f"{_SPECIAL.sub('_', name)}-{zlib.crc32(name.encode(errors='surrogatepass')):08x}"
    return path.with_name(name + suffix)


def located(path: pathlib.Path) -> pathlib.Path:
    """Returns the folder with the arrays of a checkpoint: the path itself, or the one item in the folder of a step.

    A process that was killed between two renames of :func:`replace` leaves the new checkpoint beside its place; it is found
    there. A folder of that name that no replacement left is ignored.
    """
    new = beside(path, NEW)
    if not path.is_dir() and new.is_dir() and _is_left(path):
        return new
    if not path.is_dir():
        raise FileNotFoundError(f"there is no checkpoint at {path}; save one with gradcomp_jax.save_checkpoint")
    if (path / TREE).exists():
        return path
    items = sorted(found.parent for found in path.glob(f"*/{TREE}"))
    if len(items) == 1:
        return items[0]
    if items := items or sorted(found.parent for found in path.glob(f"*/*/{TREE}")):
        names = ", ".join(item.relative_to(path).as_posix() for item in items[:3])
        more = ", ..." if len(items) > 3 else ""
        raise ValueError(f"{path} is not one checkpoint, but holds {names}{more}: pass the path of the one to restore")
    return path


def identity(path: pathlib.Path) -> Any:
    """Returns what distinguishes the checkpoint now at a path from one that replaces it; ``None`` if there is none."""
    try:
        folder = located(path)
        of_folder, of_record = os.stat(folder), os.stat(folder / FILE if (folder / FILE).exists() else folder)
    except (OSError, ValueError):
        return None
    return folder, of_folder.st_dev, of_folder.st_ino, of_record.st_ino, of_record.st_mtime_ns


@contextlib.contextmanager
def turn(path: pathlib.Path) -> Iterator[None]:
    """Lets one writer at a time write the checkpoint of a path; the processes of one run are one writer."""
    with contextlib.ExitStack() as stack:
        _everyone.in_first(lambda: stack.enter_context(taken(path)))
        yield


@contextlib.contextmanager
def taken(path: pathlib.Path) -> Iterator[None]:
    """Holds the lock of a checkpoint: waits until other writers end, and then makes them wait.

    The file of the lock, beside the checkpoint, stays if a process is killed. It says which folders beside it are a save's.
    """
    lock = beside(path, _LOCK)
    lock.parent.mkdir(parents=True, exist_ok=True)
    number = _acquired(lock)

    def leave() -> None:
        # What could not be removed is left to the next writer.
        if not any(os.path.lexists(beside(path, suffix)) for suffix in (NEW, OLD) if _is_claimed(path)):
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
                raise ValueError(f"{lock} is not of a save, and {_AWAY}") from error
            raise
        try:
            if os.pread(number, len(_CLAIM) + 1, 0) not in (b"", _CLAIM):
                raise ValueError(f"{lock} is not of a save, and {_AWAY}")
            # The process that had the lock before may have deleted this file, and there may be another one.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(number), os.stat(lock, follow_symlinks=False)):
                    return number
        except BaseException:
            os.close(number)
            raise
        os.close(number)


def _is_claimed(path: pathlib.Path) -> bool:
    """Returns whether a writer of a checkpoint left what lies beside it."""
    with contextlib.suppress(OSError):
        return read_file(beside(path, _LOCK), limit=len(_CLAIM)) == _CLAIM
    return False


def place_for(path: pathlib.Path, *, overwrite: bool) -> pathlib.Path:
    """Returns where to write a checkpoint for ``path``: there, or beside what is there now.

    Finishes an earlier replacement that a killed process left, or removes its remains. If Orbax does not take the name of the
    path literally, the checkpoint is always written beside it.
    """
    is_free = _everyone.of_first(_everyone.in_first(lambda: _prepared(path, overwrite)))
    return path if is_free and is_plain(path.name) else beside(path, NEW)


def _prepared(path: pathlib.Path, overwrite: bool) -> bool:
    """Returns whether nothing is at a path, during a turn; refuses to replace what is not a checkpoint, or not a save's."""
    new, old = beside(path, NEW), beside(path, OLD)
    left = [p for p in (new, old) if os.path.lexists(p)]
    if not all(is_checkpoint(p) and not others(p) for p in left):
        raise ValueError(f"{new} or {old} is not a checkpoint, and {_AWAY}")
    if left and not _is_claimed(path) and (os.path.lexists(path) or not _is_left(path)):
        raise ValueError(f"{new} or {old} is a checkpoint that no save to {path} has left there, and {_AWAY}")
    if not os.path.lexists(path) and new.is_dir():
        os.rename(new, path)
    for folder in left:
        if folder.is_dir():
            delete(folder)
    is_free = not os.path.lexists(path)
    if not is_free and not is_checkpoint(path):
        raise ValueError(f"{path} is not a checkpoint, and {_AWAY}")
    if not is_free and (more := others(path)):
        raise ValueError(
            f"{path} holds {', '.join(more)} beside the checkpoint, which would be deleted with it: move that away, or name"
            " another directory"
        )
    if not is_free and not overwrite:
        raise ValueError(f"{path} exists already: pass overwrite=True to replace it, or another directory")
    if not is_free or not is_plain(path.name):
        # What will lie beside the checkpoint is its writer's.
        number = os.open(beside(path, _LOCK), os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(number, "wb") as file:
            file.write(_CLAIM)
            file.flush()
            os.fsync(number)
    return is_free


def replace(path: pathlib.Path, new: pathlib.Path) -> None:
    """Moves a complete checkpoint from beside a path to the path, and deletes the one that was there.

    At every moment one of the two is whole, and :func:`located` finds it.
    """

    def swap() -> None:
        old = beside(path, OLD)
        if os.path.lexists(path):
            os.rename(path, old)
        os.rename(new, path)
        if os.path.lexists(old):
            delete(old)

    _everyone.in_first(swap)


def discard(new: pathlib.Path) -> None:
    """Deletes a checkpoint that was written but cannot be read."""
    _everyone.in_first(lambda: delete(new) if os.path.lexists(new) else None)


def _is_left(path: pathlib.Path) -> bool:
    """Returns whether a replacement left what lies beside a path: a file says so, or both are there, as in earlier versions."""
    return _is_claimed(path) or (beside(path, NEW).is_dir() and beside(path, OLD).is_dir())
