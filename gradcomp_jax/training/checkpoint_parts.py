"""What is in the folder of a checkpoint: its own files, and files that do not belong to it."""

import json
import os
import pathlib
import re
import shutil

from gradcomp_jax.training.checkpoint_record import FILE

TREE = "_METADATA"
"""The file in every folder to which Orbax has written a tree of arrays."""

_STORE = r"manifest\.ocdbt(\.__lock)?|d(/[0-9a-f]{32}(\.__lock)?)?"
_OWN = re.compile(
    rf"{TREE}|{FILE}|_sharding|_strings\.json|commit_success\.txt|array_metadatas(/process_\d\w*)?|descriptor(/descriptor\.pbtxt)?"
    rf"|{_STORE}|ocdbt\.process_\d\w*(/({_STORE}))?|run\.mark(\.[0-9a-f]{{16}}\.new)?"
)
"""What Orbax writes into the folder of a checkpoint, and the mark of a run."""

_OF_AN_ARRAY = re.compile(r"\.zarray|zarr\.json|c|(c/)?[0-9]+([./][0-9]+)*")
"""What Orbax writes, without OCDBT, for an array that has its own folder."""

_LARGEST_TREE = 1 << 28


def is_checkpoint(path: pathlib.Path) -> bool:
    """Returns whether the path is a folder, not a link, that is empty or holds a checkpoint."""
    if path.is_symlink() or not path.is_dir():
        return False
    return (path / TREE).exists() or (path / FILE).exists() or not any(path.iterdir())


def others(folder: pathlib.Path, *, but: str = "") -> list[str]:
    """Returns the names of what is in the folder of a checkpoint but not part of it, except ``but``.

    A folder that is not part of it is named without its content; what lies in one of its folders is named by its path.
    """
    arrays = _arrays_of(folder)
    return sorted(name for name in _others_in(folder, "", arrays) if name != but)


def delete(folder: pathlib.Path, *, last: str = "") -> None:
    """Deletes a checkpoint; the files that identify it go last, so that a half-deleted one is still recognised.

    What is in the folder but not part of the checkpoint stays, and then the folder stays too.
    """
    arrays = _arrays_of(folder)
    foreign = {pathlib.Path(name).parts[0] for name in _others_in(folder, "", arrays)} - {last}
    parts = [path for path in folder.iterdir() if path.name not in foreign]
    for path in sorted(parts, key=lambda path: (path.name == last, path.name in (TREE, FILE))):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _others_in(folder: pathlib.Path, within: str, arrays: frozenset[str]) -> list[str]:
    found = []
    for entry in folder.iterdir():
        name = f"{within}{entry.name}"
        is_folder = entry.is_dir() and not entry.is_symlink()
        if entry.is_symlink() or not _is_part(name, arrays):
            found.append(name)
        elif is_folder:
            found += _others_in(entry, f"{name}/", arrays)
    return found


def _is_part(name: str, arrays: frozenset[str]) -> bool:
    if _OWN.fullmatch(name):
        return True
    for array in arrays:
        # The folder of an array, its parent folders, and what it holds.
        if f"{array}/".startswith(f"{name}/"):
            return True
        if name.startswith(f"{array}/") and _OF_AN_ARRAY.fullmatch(name, len(array) + 1):
            return True
    return False


def _arrays_of(folder: pathlib.Path) -> frozenset[str]:
    """Returns the folders of single arrays, as the checkpoint's tree says; none with OCDBT, or if it cannot be read."""
    try:
        if (folder / TREE).is_symlink() or os.stat(folder / TREE).st_size > _LARGEST_TREE:
            return frozenset()
        tree = json.loads((folder / TREE).read_bytes())
        if tree.get("use_ocdbt", True):
            return frozenset()
        entries = tree["tree_metadata"].values()
        return frozenset(".".join(str(key["key"]) for key in entry["key_metadata"]) for entry in entries)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return frozenset()
