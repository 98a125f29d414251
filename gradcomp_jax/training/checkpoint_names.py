"""What a checkpoint can hold: arrays and numbers, no two of them under one name."""

import collections
import re

import jax

from gradcomp_jax._typing import PyTree


def refuse_meeting(state: PyTree) -> None:
    """Refuses a state if two of its arrays would be saved under one name, or if a leaf cannot be saved.

    Orbax joins the keys of a path with dots and uses the result as the path of a file. The record of a checkpoint joins them
    with slashes. So keys that contain dots or slashes may give equal names.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    if not jax.tree.leaves(state, is_leaf=lambda x: x is None):
        raise ValueError("the state has no arrays: there is nothing to save or restore")
    meeting = collections.defaultdict[tuple[str, str], list[str]](list)
    for path, leaf in leaves:
        keys, shown = [jax.tree_util.keystr((key,), simple=True) for key in path], jax.tree_util.keystr(path)
        if not (hasattr(leaf, "dtype") or isinstance(leaf, (bool, int, float, complex))):
            raise ValueError(
                f"{shown or 'the state'} is a {type(leaf).__name__}: a checkpoint holds arrays and numbers; take it out of the"
                " state, and keep it in a file of its own"
            )
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
