"""The folder of a checkpoint: where its arrays are, and how a new one takes its place."""

import os
import pathlib
import re
import shutil
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from gradcomp_jax.training.checkpoint_record import FILE

_TREE = "_METADATA"
"""In every folder that Orbax has written a tree of arrays to."""

_NEW, _OLD = ".gradcomp-new", ".gradcomp-old"
"""Beside a checkpoint while another one takes its place: what comes, and what goes."""

_FREE, _TAKEN, _FOREIGN, _FOREIGN_BESIDE, _MORE_IN_IT = range(5)

_OWN = re.compile(
    r"_[A-Z_]+|_sharding|_strings\.json|d|array_metadatas|descriptor|commit_success\.txt|manifest\.ocdbt.*|ocdbt\.process_\d+.*"
    r"|.*\.orbax-checkpoint-tmp.*|run\.mark(\.[0-9a-f]{16}\.new)?"
)
"""Names that Orbax gives to what it writes into the folder of a checkpoint, and the mark of a run."""


def located(path: pathlib.Path) -> pathlib.Path:
    """Returns the folder with the arrays of a checkpoint: the path itself, or the one item in the folder of a step.

    A process that was killed between two renames of :func:`replace` leaves the new checkpoint beside its place: it is found.

    Raises:
        FileNotFoundError: if there is no folder.
        ValueError: if it holds several items, or steps.
    """
    beside = _beside(path, _NEW)
    if not path.is_dir() and beside.is_dir():
        return beside
    if not path.is_dir():
        raise FileNotFoundError(f"there is no checkpoint at {path}; save one with gradcomp_jax.save_checkpoint")
    if (path / _TREE).exists():
        return path
    items = sorted(found.parent for found in path.glob(f"*/{_TREE}"))
    if len(items) == 1:
        return items[0]
    if items := items or sorted(found.parent for found in path.glob(f"*/*/{_TREE}")):
        names = ", ".join(item.relative_to(path).as_posix() for item in items[:3])
        more = ", ..." if len(items) > 3 else ""
        raise ValueError(f"{path} is not one checkpoint, but holds {names}{more}: pass the path of the one to restore")
    return path


def place_for(path: pathlib.Path, *, overwrite: bool) -> pathlib.Path:
    """Returns where to write a checkpoint that shall be at ``path``: there, or beside what is there now.

    Finishes or clears away what a killed process left of an earlier replacement.

    Raises:
        ValueError: if something is there and ``overwrite`` is not set, or what is there is not a checkpoint.
    """
    found = _on_first_process(lambda: _state_of(path))
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
        what = path if found == _FOREIGN else f"{_beside(path, _NEW)} or {_beside(path, _OLD)}"
        raise ValueError(
            f"{what} is not a checkpoint, and is left as it is: name another directory, or move it away by hand"
        )
    return _beside(path, _NEW) if found == _TAKEN else path


def replace(path: pathlib.Path, new: pathlib.Path) -> None:
    """Puts a complete checkpoint from beside a path into its place, and deletes the one that was there.

    At every moment one of the two is whole, and :func:`located` finds it.
    """

    def swap() -> int:
        old = _beside(path, _OLD)
        os.rename(path, old)
        os.rename(new, path)
        delete(old)
        return 0

    _on_first_process(swap)


def _beside(path: pathlib.Path, suffix: str) -> pathlib.Path:
    return path.with_name(path.name + suffix)


def _state_of(path: pathlib.Path) -> int:
    """What is at a path, once an earlier replacement is finished."""
    new, old = _beside(path, _NEW), _beside(path, _OLD)
    if not all(_is_checkpoint(p) and not others(p) for p in (new, old) if os.path.lexists(p)):
        return _FOREIGN_BESIDE
    if not os.path.lexists(path) and new.is_dir():
        os.rename(new, path)
    for left in (new, old):
        if left.is_dir():
            delete(left)
    if not os.path.lexists(path):
        return _FREE
    if not _is_checkpoint(path):
        return _FOREIGN
    return _MORE_IN_IT if others(path) else _TAKEN


def _is_checkpoint(path: pathlib.Path) -> bool:
    """Whether it is a folder, not a link to one, that is empty or that a checkpoint was written to."""
    if path.is_symlink() or not path.is_dir():
        return False
    return (path / _TREE).exists() or (path / FILE).exists() or not any(path.iterdir())


def others(folder: pathlib.Path, *, but: str = "") -> list[str]:
    """Returns the names of what is in the folder of a checkpoint and no part of it, nor called ``but``."""
    return sorted(path.name for path in folder.iterdir() if path.name != but and not _is_part(path))


def delete(folder: pathlib.Path, *, last: str = "") -> None:
    """Deletes a checkpoint; what shows that it is one goes last, so that half of one is known for what it is.

    What is in the folder and no part of it stays, and so does the folder then.

    Args:
        folder: of the checkpoint.
        last: the name of a file in it that goes at the very end.
    """
    parts = [path for path in folder.iterdir() if path.name == last or _is_part(path)]
    for path in sorted(parts, key=lambda path: (path.name == last, path.name in (_TREE, FILE))):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _is_part(path: pathlib.Path) -> bool:
    # Without OCDBT every array has a folder of its name.
    return _OWN.fullmatch(path.name) is not None or (path / ".zarray").exists()


def _on_first_process(function: Callable[[], int]) -> int:
    """Runs a function of a shared folder in the first process, and returns what it returns in all of them, after it."""
    found = function() if jax.process_index() == 0 else 0
    if jax.process_count() > 1:
        found = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
    return found
