"""The base class of collectives: how messages cross an axis. A collective checks what it carries, sends it and receives it."""

import abc
import dataclasses
from collections.abc import Generator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from gradcomp_jax import _compat, _costs
from gradcomp_jax._typing import Array, AxisName
from gradcomp_jax.collectives.inbound_message import InboundMessage
from gradcomp_jax.compressors import Compressor, RowInfo, nbytes
from gradcomp_jax.memory import Memory

Remainder = Literal["split", "put_back", "server", "drop"]
"""What becomes of what the downlink loses: see :class:`~gradcomp_jax.collectives.TwoPhase`."""


@dataclasses.dataclass(frozen=True)
class Workers:
    """Describes the workers along an axis.

    Attributes:
        count: N, how many there are.
        index: this worker's number, int32 scalar.
        axis_name: the axis; ``None`` for one worker.
    """

    count: int
    index: Array
    axis_name: AxisName | None

    @classmethod
    def along(cls, axis_name: AxisName | None) -> "Workers":
        """Returns the workers along a mapped axis."""
        return cls(_compat.axis_size(axis_name) or 1, _compat.axis_index(axis_name), axis_name)


class Send(NamedTuple):
    """Holds what a collective puts into one operation of the axis.

    Attributes:
        by: ``permute``, to one partner; ``all_to_all``, slice i of each array to worker i; ``all_gather``, to all workers,
            stacked; ``psum``, added up.
        payload: a tree of arrays.
        partners: for ``permute``, the worker that each worker sends to.
        shapes: for ``psum``, the shapes of the tensors whose entries each array holds, one after the other and nothing else.
        bad: boolean scalar, whether the payload is unusable; ``None`` where its sender has checked it.
    """

    by: Literal["permute", "all_to_all", "all_gather", "psum"]
    payload: Any
    partners: tuple[int, ...] = ()
    bad: Array | None = None
    shapes: Sequence[tuple[int, ...]] = ()


class Message(Protocol):
    """Defines what a collective reads of a message: the payload of one compressor on one worker."""

    @property
    def compressor(self) -> Compressor:
        """Returns the compressor that encoded the message."""

    @property
    def payload(self) -> Any:
        """Returns the payload, leaves ``[rows, ...]``."""

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Returns the shape of each tensor that the message was made of; ``()`` for several that go as one."""

    @property
    def info(self) -> RowInfo:
        """Returns the info of its rows: their counts, the side information of all workers, a key for a second encoding."""

    @property
    def remainder(self) -> Remainder | None:
        """Returns what becomes of what the downlink loses; ``None`` where nothing is lost."""

    @property
    def residual(self) -> Array | None:
        """Returns what this worker keeps as an owner of rows, float32 ``[ceil(rows / N), block]``, or ``None``.

        With a residual, owners take rows in turn; otherwise each owner has equally many consecutive rows.
        """


_KINDS = {"permute": "collective-permute", "all_to_all": "all-to-all", "all_gather": "all-gather", "psum": "all-reduce"}

Steps = Generator[Send, Any, InboundMessage]
"""The operations of a collective: a generator that yields what it sends, gets what came in, and returns an inbound message."""


@dataclasses.dataclass(frozen=True)
class Collective(abc.ABC):
    """Says how payloads cross an axis of N workers. It is static and hashable."""

    def check(self, compressor: Compressor, memory: Memory) -> None:
        """Refuses combinations that break a law, naming the remedy.

        Raises:
            ValueError: at construction, before anything is traced.
        """
        if compressor.side_information == "mean":
            raise ValueError(
                f"the payloads of {type(compressor).__name__} must be added, {type(self).__name__} does not; use"
                " collective='auto' or 'all_reduce'"
            )

    def resolve(self, compressor: Compressor, rows: int, workers: int) -> "Collective":
        """Returns the collective for this number of rows and workers: itself, except ``auto``.

        Raises:
            ValueError: if it does not work with this number of workers.
        """
        return self

    def remainder_of(self, compressor: Compressor, memory: Memory, workers: int) -> Remainder | None:
        """Returns what becomes of what the downlink loses; ``None`` where there is no loss."""
        return None

    def owners_from(self, compressor: Compressor, memory: Memory) -> int | None:
        """Returns the number of workers from which owners have a residual; ``None`` if they never have one."""
        return None

    @abc.abstractmethod
    def sends(self, compressor: Compressor, rows: int, workers: int) -> list[Send]:
        """Returns what :meth:`steps` yields for a message of ``rows`` rows, with shapes instead of arrays."""

    def bytes_sent(self, compressor: Compressor, rows: int, workers: int) -> int:
        """Returns the bytes that one of ``workers`` sends for ``rows`` rows, without padding to a multiple of the workers."""
        # With N times as many rows there is no padding.
        every = self.sends(compressor, rows * workers, workers)
        return sum(_costs.bytes_moved(_KINDS[s.by], nbytes(s.payload), workers) for s in every) // workers

    @abc.abstractmethod
    def steps(self, message: Message, workers: Workers) -> Steps:
        """Takes one message across in the order of :class:`Send`; operations other than ``permute`` occur at most once each."""
