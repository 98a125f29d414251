"""Reads checkpoints: an error is one sentence, and what was just written is read back before it counts."""

import contextlib
import gc
import logging
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from gradcomp_jax import _everyone
from gradcomp_jax._typing import PyTree
from gradcomp_jax.training import checkpoint_files
from gradcomp_jax.training.carried import names_of
from gradcomp_jax.training.checkpoint_record import read_record

_LATE_S = 0.1
"""Seconds to wait for other reads and writes after one of them has failed."""


class DamagedCheckpointError(ValueError):
    """Reports a checkpoint whose files, or some of them, cannot be read."""


@contextlib.contextmanager
def damage(path: pathlib.Path) -> Iterator[None]:
    """Adds to any error of reading files which checkpoint it was, and what to do."""
    with without_echoes():
        try:
            yield
        except Exception as error:
            reason = str(error).strip().partition("\n")[0][:200]
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise DamagedCheckpointError(
                f"the checkpoint at {path} is damaged ({kind}{reason}): go back to an earlier checkpoint, or start anew in"
                " another folder"
            ) from error


@contextlib.contextmanager
def without_echoes() -> Iterator[None]:
    """Leaves one error of several parallel reads or writes; Python would print others, which end after their event loop."""
    before, logs = sys.unraisablehook, [logging.getLogger(name) for name in ("asyncio", "absl")]

    def hook(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            before(unraisable)

    def keep(record: logging.LogRecord) -> bool:
        # Threads of Orbax log what they raise.
        echo = record.name == "absl" and record.exc_info
        return not echo and "exception was never retrieved" not in record.getMessage()

    sys.unraisablehook = hook
    for log in logs:
        log.addFilter(keep)
    try:
        yield
    except Exception:
        time.sleep(_LATE_S)
        gc.collect(1)
        raise
    finally:
        sys.unraisablehook = before
        for log in logs:
            log.removeFilter(keep)


def refuse_unreadable(checkpointer: Any, place: pathlib.Path, plain: pathlib.Path) -> None:
    """Reads the record of a checkpoint that was just written, and deletes the checkpoint if that fails."""
    reason = ""
    try:
        with without_echoes():
            _, record = described(checkpointer, place, plain)
        reason = "" if record else "it does not say what is in it"
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
    if any(_everyone.of_all(bool(reason))):
        checkpoint_files.discard(place)
        raise ValueError(
            f"what was saved to {place} cannot be read back ({reason or 'by another process'}), and is deleted; a checkpoint"
            " that was there before is kept: save to a directory of another name or file system"
        )


def described(checkpointer: Any, path: pathlib.Path, plain: pathlib.Path) -> tuple[PyTree, dict[str, Any] | None]:
    """Returns the arrays that a checkpoint holds, as Orbax finds them, and its record."""
    metadata = checkpointer.metadata(plain)
    tree = getattr(metadata, "item_metadata", metadata)
    tree = getattr(tree, "tree", tree)
    if tree is None:
        raise ValueError("the list of its arrays cannot be read")
    return tree, read_record(path, {name: tuple(leaf.shape) for name, leaf in names_of(tree).items()})
