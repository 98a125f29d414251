"""Names of arrays in a checkpoint: no two of a state may be one."""

import collections
import re

import jax

from gradcomp_jax._typing import PyTree


def refuse_meeting(state: PyTree) -> None:
    """Refuses a state of which two arrays would be saved under one name, or whose names cannot be written.

    Orbax joins the keys of a path with dots and takes the result for the path of a file, the record of a checkpoint joins them
    with slashes: keys that have dots or slashes in them may meet.

    Raises:
        ValueError: naming two such arrays.
    """
    meeting = collections.defaultdict[tuple[str, str], list[str]](list)
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        keys, shown = [jax.tree_util.keystr((key,), simple=True) for key in path], jax.tree_util.keystr(path)
        try:
            "".join(keys).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{shown} of the state has a name that is not Unicode: rename it") from error
        meeting["files", re.sub("/+", "/", f"/{'.'.join(keys)}/")].append(shown)
        meeting["names", "/".join(keys)].append(shown)
    for found in meeting.values():
        if len(found) > 1:
            raise ValueError(
                f"{found[0]} and {found[1]} of the state would be one array in a checkpoint, which joins the keys of a path:"
                " rename one of them"
            )
