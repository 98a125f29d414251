"""Digests of a checkpoint's files: a bit that flips on a disk is found before it is trained on."""

import hashlib
import json
import os
import pathlib

import jax
import numpy as np
from jax.experimental import multihost_utils

_NAME = "sha256.json"


def write_digests(folder: pathlib.Path) -> None:
    """Writes the digest of every file in a folder into one more file, in one go.

    With several processes the first one does it, and reads what the others have written.
    """
    if jax.process_index() != 0:
        return
    draft = folder / f"{_NAME}.draft"
    draft.write_text(json.dumps(_digests(folder)))
    os.replace(draft, folder / _NAME)


def damaged_files(folder: pathlib.Path) -> int:
    """Returns how many files of a folder are missing or differ from their digests; 0 where no digests were written.

    With several processes the first one looks and tells the others, so that all of them go on or none does.
    """
    found = _damaged(folder) if jax.process_index() == 0 else 0
    if jax.process_count() > 1:
        found = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
    return found


def _damaged(folder: pathlib.Path) -> int:
    try:
        written = json.loads((folder / _NAME).read_bytes())
        present = _digests(folder)
        return sum(present.get(name) != digest for name, digest in written.items())
    except FileNotFoundError:
        return 0
    except (ValueError, AttributeError, OSError):
        return 1


def _digests(folder: pathlib.Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(_NAME):
            with path.open("rb") as file:
                found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
