"""The objects in a store, to bytes and back. Whoever reads one checks it: anybody may have written it."""

import dataclasses
import functools
import json
import math
from typing import Any

import numpy as np

from gradcomp_jax.islands.keys import digest

VERSION = 1
_MAGIC = b"gcisland"
_LARGEST_HEAD = 1 << 16


class NotOursError(ValueError):
    """Says that bytes are not the object that they should be."""


def to_json(value: Any) -> bytes:
    """Returns JSON that has one form only: sorted, without spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def from_json(data: bytes, what: str) -> dict[str, Any]:
    """Returns a dictionary of which :func:`to_json` makes exactly these bytes."""
    try:
        value = json.loads(data)
        if isinstance(value, dict) and to_json(value) == data:
            return value
    except (ValueError, RecursionError):
        pass
    raise NotOursError(f"this is no {what}")


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Holds what all islands of a run have in common. It is written once, and compared by its digest.

    Attributes:
        size: entries of the centre.
        code: digest of the code of the payloads and of the shapes that it is for.
        learning_rate: of the outer step.
        momentum: of the outer step; 0 for none.
        nesterov: whether the outer momentum is Nesterov's.
        quorum: payloads that a round needs.
        grace: seconds that a round waits for living islands once it has a quorum.
        patience: seconds after which an island whose heartbeat does not count on is not waited for.
        snapshot_every: rounds from one snapshot of the centre to the next.
        norm_limit: how many times the median of the others a payload's norm may be.
        weights: the least and the largest weight.
        version: of the objects.
    """

    size: int
    code: str
    learning_rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    quorum: int = 1
    grace: float = 10.0
    patience: float = 60.0
    snapshot_every: int = 10
    norm_limit: float = 10.0
    weights: tuple[float, float] = (1 / 1024, 1024.0)
    version: int = VERSION

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields, as JSON has them."""
        return dataclasses.asdict(self) | {"weights": list(self.weights)}

    @functools.cached_property
    def digest(self) -> str:
        """Returns the digest by which it is compared."""
        return digest(to_json(self.to_dict()))

    @classmethod
    def from_dict(cls, value: Any) -> "Configuration":
        """Returns a configuration that somebody has written; other fields than these are of another version."""
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(value, dict) or set(value) != names or len(value["weights"]) != 2:
            raise NotOursError("this is no configuration of islands, or that of another version of this library")
        return cls(**(value | {"weights": tuple(value["weights"])}))


@dataclasses.dataclass(frozen=True)
class Entry:
    """Names a payload that a round accepts."""

    island: str
    weight: float
    digest: str
    size: int


@dataclasses.dataclass(frozen=True)
class Decision:
    """Says which payloads a round accepts. There is one for each round: the first that is created.

    Attributes:
        round: its number, from 1 on.
        before: digest of the centre and the outer optimizer's state before the round.
        entries: the accepted payloads, by island.
        members: the islands that were alive, as far as who decided could see.
        by: who decided.
    """

    round: int
    before: str
    entries: tuple[Entry, ...]
    members: tuple[str, ...]
    by: str

    def accepts(self, island: str, of: str) -> bool:
        """Returns whether it accepts this payload of this island."""
        return any(entry.island == island and entry.digest == of for entry in self.entries)

    def to_bytes(self) -> bytes:
        """Returns the object."""
        return to_json(dataclasses.asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Decision":
        """Returns the decision that an object is."""
        value = from_json(data, "decision")
        try:
            entries = tuple(Entry(**entry) for entry in value.pop("entries"))
            decision = cls(entries=entries, members=tuple(value.pop("members")), **value)
            names = [entry.island for entry in decision.entries]
            if not names or names != sorted(set(names)) or not all(_is_weight(entry.weight) for entry in entries):
                raise NotOursError("a decision has payloads, one of each island, in order")
        except (TypeError, KeyError, AttributeError) as error:
            raise NotOursError("this is no decision") from error
        return decision


@dataclasses.dataclass(frozen=True)
class Payload:
    """Holds an island's part of a round.

    Attributes:
        configuration: digest of the configuration.
        round: the round that it is for.
        island: whose it is.
        weight: what it counts for.
        before: digest of the centre that the island had.
        body: what the code made.
    """

    configuration: str
    round: int
    island: str
    weight: float
    before: str
    body: bytes

    def to_bytes(self) -> bytes:
        """Returns the object: a magic word, the length of the head, the head in JSON, and the body."""
        head = to_json({name: value for name, value in vars(self).items() if name != "body"})
        return _MAGIC + len(head).to_bytes(4, "little") + head + self.body

    @classmethod
    def from_bytes(cls, data: bytes) -> "Payload":
        """Returns the payload that an object is."""
        length = int.from_bytes(data[8:12], "little")
        if data[:8] != _MAGIC or length > min(_LARGEST_HEAD, len(data) - 12):
            raise NotOursError("this is no payload")
        value = from_json(data[12 : 12 + length], "payload")
        if set(value) != {"configuration", "round", "island", "weight", "before"} or not _is_weight(value["weight"]):
            raise NotOursError("this is no payload")
        return cls(body=data[12 + length :], **value)


def _is_weight(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0 and float(np.float32(value)) == value
