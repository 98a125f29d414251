"""Whether all processes see one folder: checkpoints of several machines need one."""

import pathlib
import secrets
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from gradcomp_jax._errors import SettingError

# A network file system may show a new file on other machines only after a while.
_TIMEOUT_S = 5.0


def check_shared(folder: pathlib.Path) -> None:
    """Makes a folder, and makes sure that every process sees the same one.

    The first process writes a random number into a file and sends it to the others, which must find it there.

    Args:
      folder: it is made when it is not there.

    Raises:
      SettingError: in every process, if one of them cannot write to the folder or sees another.
    """
    token, first = secrets.randbits(31), jax.process_index() == 0
    path = folder / "processes.token"
    problem = ""
    try:
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(str(token))
    except OSError as error:
        problem = str(error)
    if jax.process_count() > 1:
        token = int(multihost_utils.broadcast_one_to_all(np.uint32(token)))
        found = not problem and _appears(path, str(token))
        blind = np.flatnonzero(~multihost_utils.process_allgather(np.asarray([found])).reshape(-1))
        if len(blind) and not problem:
            problem = f"process {', '.join(map(str, blind))} does not see what process 0 writes there"
    if first:
        path.unlink(missing_ok=True)
    if problem:
        raise SettingError(
            f"cannot save in {folder}: {problem}; name a folder that every process can write to and share"
        )


def _appears(path: pathlib.Path, text: str) -> bool:
    until = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            if path.read_text() == text:
                return True
        except OSError:
            pass
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
