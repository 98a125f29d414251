"""The names of objects in a store."""

import hashlib
import re
from typing import Any, NamedTuple

import numpy as np

from gradcomp_jax._errors import SettingError

CONFIGURATION = "configuration"
ROUNDS, CENTRES, ISLANDS, WEIGHTS = "round", "centre", "island", "weights"
OURS = (CONFIGURATION, ROUNDS, CENTRES, ISLANDS, WEIGHTS)
_DIGEST = "[0-9a-f]{32}"
_PAYLOAD = re.compile(rf"island/([^/]+)/payload-([0-9]{{10}})-({_DIGEST})")
_CENTRE = re.compile(rf"centre/([0-9]{{10}})-({_DIGEST})")
_ALIVE = re.compile(r"island/([^/]+)/alive")
_ISLAND = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


class Name(NamedTuple):
    """Holds what a key says."""

    key: str
    island: str
    round: int
    digest: str


def digest(*parts: Any) -> str:
    """Returns 32 hexadecimal digits of bytes or arrays, one after the other."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).data)
    return found.hexdigest()


def check_island(name: str) -> str:
    """Returns the name of an island, which is a part of keys."""
    if not isinstance(name, str) or not _ISLAND.fullmatch(name):
        raise SettingError(
            "an island's name has at most 63 letters, digits, '_', '.' and '-', and begins with one of the first two,"
            f" got {name!r}"
        )
    return name


def round_key(number: int) -> str:
    """Returns the key of a decision."""
    return f"{ROUNDS}/{number:010d}"


def centre_key(number: int, state: str) -> str:
    """Returns the key of the centre after a round, whose digest is ``state``."""
    return f"{CENTRES}/{number:010d}-{state}"


def payload_key(island: str, number: int, of: str) -> str:
    """Returns the key of an island's payload for a round."""
    return f"{ISLANDS}/{island}/payload-{number:010d}-{of}"


def owner_key(island: str) -> str:
    """Returns the key of the object that says whose a name is."""
    return f"{ISLANDS}/{island}/owner"


def alive_key(island: str) -> str:
    """Returns the key of an island's heartbeat."""
    return f"{ISLANDS}/{island}/alive"


def read_payload_key(key: str) -> Name | None:
    """Returns what the key of a payload says, or ``None`` for another key."""
    found = _PAYLOAD.fullmatch(key)
    return Name(key, found[1], int(found[2]), found[3]) if found else None


def read_centre_key(key: str) -> Name | None:
    """Returns what the key of a centre says, or ``None`` for another key."""
    found = _CENTRE.fullmatch(key)
    return Name(key, "", int(found[1]), found[2]) if found else None


def read_alive_key(key: str) -> str | None:
    """Returns whose heartbeat a key is, or ``None`` for another key."""
    found = _ALIVE.fullmatch(key)
    return found[1] if found else None
