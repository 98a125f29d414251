"""What an island keeps, has under way, and writes to its own disk before anybody else can see it."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from gradcomp_jax.islands.keys import digest
from gradcomp_jax.islands.objects import Decision, NotOursError, Payload, from_json, to_json
from gradcomp_jax.islands.outer import Vector


class Code(Protocol):
    """Encodes a vector to bytes.

    Attributes:
        digest: of its configuration, and of the shapes that it is for.
        size: entries of the vector.
    """

    digest: str
    size: int

    def encode(self, vector: Vector, seed: int) -> bytes:
        """Returns the bytes of a vector; ``seed`` is for codes that draw."""

    def decode(self, data: bytes) -> Vector:
        """Returns the vector, the same bits on all machines.

        Raises:
            ValueError: for bytes that are not of this code, or not finite.
        """


@dataclasses.dataclass(frozen=True)
class Flight:
    """Holds a payload from its departure to the decision of its round.

    Attributes:
        round: the round that it is for.
        island: whose it is.
        message: the object.
        sent: what its body decodes to.
    """

    round: int
    island: str
    message: bytes
    sent: Vector

    @property
    def digest(self) -> str:
        """Returns the digest of the object."""
        return digest(self.message)


class Account:
    r"""Keeps what an island has not sent, and what it has under way.

    Law: accepted + kept + in flight + :math:`w` (base - x) = everything that the island has seen, where the last is its
    progress since it departed. It holds at every moment, up to rounding.
    """

    def __init__(self, kept: Vector, flight: Flight | None = None) -> None:
        """Takes what is kept, and what is under way."""
        self.kept, self.flight = kept, flight

    def depart(
        self,
        progress: Vector,
        weight: float,
        head: Payload,
        code: Code,
        *,
        most: float | None = None,
        decay: float = 1.0,
    ) -> Flight:
        """Encodes the weighted progress and what was kept: what the payload lacks is kept.

        Args:
            progress: base minus parameters.
            weight: what it counts for.
            head: the payload without its body.
            code: makes the body.
            most: the largest norm of a payload; what is beyond is kept, and goes out later.
            decay: of what was kept.
        """
        kept = self.kept if decay == 1 else np.float32(decay) * self.kept
        target = np.float32(weight) * progress + kept
        out = target
        if most is not None and (norm := norm_of(target)) > most:
            out = target * np.float32(most / norm)
        body = code.encode(out, int(digest(head.island.encode(), head.round.to_bytes(8, "little"))[:8], 16))
        sent = code.decode(body)
        self.kept = target - sent
        self.flight = Flight(head.round, head.island, dataclasses.replace(head, body=body).to_bytes(), sent)
        return self.flight

    def settle(self, decision: Decision) -> bool:
        """Takes back what is under way, unless the decision of its round accepts it; returns whether it does."""
        flight = self.flight
        if flight is None or decision.round != flight.round:
            raise ValueError("this decision is of another round")
        accepted = decision.accepts(flight.island, flight.digest)
        if not accepted:
            self.kept = self.kept + flight.sent
        self.flight = None
        return accepted


@dataclasses.dataclass
class Record:
    """Holds what an island has on its own disk: all that it needs to go on after a crash without a loss.

    Attributes:
        island: its name.
        token: shows that the name is its own.
        configuration: digest of the run's.
        wrote: keys of the objects in the store that it wrote and has not deleted, with their digests.
        missed: rounds in a row that did not accept its payload.
        start: digest of the run's first centre; empty before it has joined.
        kept: what it has not sent.
        round: the round of the payload under way.
        message: the payload under way; empty for none.
        progress: progress since the departure, where it was saved later; empty for none.
    """

    island: str
    token: str
    configuration: str
    wrote: dict[str, str]
    missed: int
    start: str
    kept: Vector
    round: int = 0
    message: bytes = b""
    progress: Vector = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))

    _ARRAYS = ("kept", "message", "progress")

    def to_bytes(self) -> bytes:
        """Returns the content of the file."""
        parts = [self.kept.astype("<f4").tobytes(), self.message, self.progress.astype("<f4").tobytes()]
        head: dict[str, Any] = {name: value for name, value in vars(self).items() if name not in self._ARRAYS}
        text = to_json(head | {"lengths": [len(part) for part in parts]})
        return b"".join([len(text).to_bytes(4, "little"), text, *parts, bytes.fromhex(digest(text, *parts))])

    @classmethod
    def from_bytes(cls, data: bytes) -> "Record":
        """Returns the record that a file holds."""
        end = 4 + int.from_bytes(data[:4], "little")
        if digest(data[4:-16]) != data[-16:].hex():
            raise NotOursError("the record of this island is damaged")
        head = from_json(data[4:end], "record of an island")
        parts = list(_cut(data, end, head.pop("lengths")))
        kept, progress = (np.frombuffer(parts[i], "<f4").astype(np.float32) for i in (0, 2))
        return cls(**head, kept=kept, message=parts[1], progress=progress)

    def account(self, code: Code) -> Account:
        """Returns the account that it was made of."""
        if not self.message:
            return Account(self.kept)
        sent = code.decode(Payload.from_bytes(self.message).body)
        return Account(self.kept, Flight(self.round, self.island, self.message, sent))


def _cut(data: bytes, start: int, lengths: Iterable[int]) -> Iterable[bytes]:
    for length in lengths:
        yield data[start : start + length]
        start += length


def norm_of(vector: Vector) -> float:
    """Returns the Euclidean norm; what overflows float32 does not overflow here."""
    return float(np.sqrt(np.einsum("i,i->", vector, vector, dtype=np.float64)))
