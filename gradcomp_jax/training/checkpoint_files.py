"""The folder of a checkpoint: where its arrays are, and how a new checkpoint replaces it."""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from gradcomp_jax import _everyone
from gradcomp_jax.training import checkpoint_turns
from gradcomp_jax.training.checkpoint_parts import TREE, delete, is_checkpoint, others
from gradcomp_jax.training.checkpoint_record import FILE
from gradcomp_jax.training.checkpoint_turns import NEW, OLD, beside
from gradcomp_jax.training.plain_paths import is_plain

_FAILED, _FREE, _TAKEN, _FOREIGN, _FOREIGN_BESIDE, _UNCLAIMED, _MORE_IN_IT = range(-1, 6)


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

        def take() -> int:
            stack.enter_context(checkpoint_turns.taken(path))
            return 0

        _on_first_process(take)
        yield


def place_for(path: pathlib.Path, *, overwrite: bool) -> pathlib.Path:
    """Returns where to write a checkpoint for ``path``: there, or beside what is there now.

    Finishes an earlier replacement that a killed process left, or removes its remains. If Orbax does not take the name of the
    path literally, the checkpoint is always written beside it.
    """
    new, old = beside(path, NEW), beside(path, OLD)

    def prepare() -> int:
        found = _state_of(path)
        if found == _TAKEN or (found == _FREE and not is_plain(path.name)):
            checkpoint_turns.claim(path)
        return found

    found = _on_first_process(prepare)
    if found == _TAKEN and not overwrite:
        raise ValueError(
            f"{path} exists already: pass overwrite=True to replace the checkpoint there, or another directory"
        )
    if found == _MORE_IN_IT:
        raise ValueError(
            f"{path} holds {', '.join(others(path)) or 'other files'} beside the checkpoint, which would be deleted with it:"
            " move that away, or name another directory"
        )
    if found in (_FOREIGN, _FOREIGN_BESIDE):
        what = path if found == _FOREIGN else f"{new} or {old}"
        raise ValueError(
            f"{what} is not a checkpoint, and is left as it is: name another directory, or move it away by hand"
        )
    if found == _UNCLAIMED:
        raise ValueError(
            f"{new} or {old} is a checkpoint that no save to {path} has left there, and is left as it is: name another"
            " directory, or move it away by hand"
        )
    return path if found == _FREE and is_plain(path.name) else new


def replace(path: pathlib.Path, new: pathlib.Path) -> None:
    """Moves a complete checkpoint from beside a path to the path, and deletes the one that was there.

    At every moment one of the two is whole, and :func:`located` finds it.
    """

    def swap() -> int:
        old = beside(path, OLD)
        if os.path.lexists(path):
            os.rename(path, old)
        os.rename(new, path)
        if os.path.lexists(old):
            delete(old)
        return 0

    _on_first_process(swap)


def discard(new: pathlib.Path) -> None:
    """Deletes a checkpoint that was written but cannot be read."""

    def drop() -> int:
        if os.path.lexists(new):
            delete(new)
        return 0

    _on_first_process(drop)


def _is_left(path: pathlib.Path) -> bool:
    """Returns whether a replacement left what lies beside a path: a file says so, or both are there, as in earlier versions."""
    return checkpoint_turns.is_claimed(path) or (beside(path, NEW).is_dir() and beside(path, OLD).is_dir())


def _state_of(path: pathlib.Path) -> int:
    """Returns what is at a path, after finishing an earlier replacement."""
    new, old = beside(path, NEW), beside(path, OLD)
    left = [p for p in (new, old) if os.path.lexists(p)]
    if not all(is_checkpoint(p) and not others(p) for p in left):
        return _FOREIGN_BESIDE
    if left and not checkpoint_turns.is_claimed(path) and (os.path.lexists(path) or not _is_left(path)):
        return _UNCLAIMED
    if not os.path.lexists(path) and new.is_dir():
        os.rename(new, path)
    for folder in left:
        if folder.is_dir():
            delete(folder)
    if not os.path.lexists(path):
        return _FREE
    if not is_checkpoint(path):
        return _FOREIGN
    return _MORE_IN_IT if others(path) else _TAKEN


def _on_first_process(function: Callable[[], int]) -> int:
    """Runs a function on a shared folder in the first process, and then returns its result in all processes."""
    found, problem = 0, None
    if jax.process_index() == 0:
        try:
            found = function()
        except Exception as error:
            found, problem = _FAILED, error
    found = _everyone.of_first(found)
    if problem is not None:
        raise problem
    if found == _FAILED:
        raise OSError("the first process could not write there: its error says why")
    return found
