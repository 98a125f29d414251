"""What every collective is: how messages cross an axis. It knows what it may carry, what goes out and what comes in."""

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
    """The workers along an axis.

    Attributes:
        count: N, how many there are.
        index: this one's number, int32 scalar.
        axis_name: the axis; ``None`` for one worker.
    """

    count: int
    index: Array
    axis_name: AxisName | None

    @classmethod
    def along(cls, axis_name: AxisName | None) -> "Workers":
        """Returns those along a mapped axis."""
        return cls(_compat.axis_size(axis_name) or 1, _compat.axis_index(axis_name), axis_name)


class Send(NamedTuple):
    """What a collective puts into an operation of the axis.

    Attributes:
        by: ``permute``, to one partner; ``all_to_all``, slice i of each array to worker i; ``all_gather``, to everybody,
            stacked; ``psum``, added up.
        payload: a tree of arrays.
        partners: of ``permute``, whom each worker sends to.
        shapes: of ``psum``, of the tensors that each array has the entries of, one after the other, where it has just these.
        bad: boolean scalar, whether the payload is unusable; ``None`` where its sender has checked it.
    """

    by: Literal["permute", "all_to_all", "all_gather", "psum"]
    payload: Any
    partners: tuple[int, ...] = ()
    bad: Array | None = None
    shapes: Sequence[tuple[int, ...]] = ()


class Message(Protocol):
    """What a collective reads of a message: the payload of one compressor on one worker."""

    @property
    def compressor(self) -> Compressor:
        """Returns the compressor that encoded it."""

    @property
    def payload(self) -> Any:
        """Returns leaves ``[rows, ...]``."""

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Returns the shape of each tensor that it was made of; ``()`` of several that go as one."""

    @property
    def info(self) -> RowInfo:
        """Returns what is known of its rows: their counts, the side information of all workers, a key for a second encoding."""

    @property
    def remainder(self) -> Remainder | None:
        """Returns what becomes of what the downlink loses; ``None`` where nothing is lost."""

    @property
    def residual(self) -> Array | None:
        """Returns what this worker keeps as an owner of rows, float32 ``[ceil(rows / N), block]``, or ``None``.

        With one, owners take rows in turn; otherwise each owns as many that follow one another.
        """


_KINDS = {"permute": "collective-permute", "all_to_all": "all-to-all", "all_gather": "all-gather", "psum": "all-reduce"}

Steps = Generator[Send, Any, InboundMessage]
"""The operations of a collective: yields what it sends, is given what came, and returns the message that came of it."""


@dataclasses.dataclass(frozen=True)
class Collective(abc.ABC):
    """How payloads cross an axis of N workers. Static and hashable."""

    def check(self, compressor: Compressor, memory: Memory) -> None:
        """Refuses combinations that cannot keep the laws, naming the remedy.

        Raises:
            ValueError: at construction, before anything is traced.
        """
        if compressor.side_information == "mean":
            raise ValueError(
                f"the payloads of {type(compressor).__name__} must be added, {type(self).__name__} does not; use"
                " collective='auto' or 'all_reduce'"
            )

    def resolve(self, compressor: Compressor, rows: int, workers: int) -> "Collective":
        """Returns the collective that is taken for so many rows and workers: itself, unless it is to be chosen.

        Raises:
            ValueError: if it does not go with this number of workers.
        """
        return self

    def remainder_of(self, compressor: Compressor, memory: Memory, workers: int) -> Remainder | None:
        """Returns what becomes of what the downlink loses; ``None`` where there is no loss."""
        return None

    def owners_from(self, compressor: Compressor, memory: Memory) -> int | None:
        """Returns the number of workers from which on owners have a residual; ``None`` if they never have one."""
        return None

    @abc.abstractmethod
    def sends(self, compressor: Compressor, rows: int, workers: int) -> list[Send]:
        """Returns what :meth:`steps` yields for a message of ``rows`` rows, with shapes in the place of arrays."""

    def bytes_sent(self, compressor: Compressor, rows: int, workers: int) -> int:
        """Returns the bytes that one of ``workers`` sends for ``rows`` rows, padding to their number left out."""
        # N times as many rows need no padding.
        every = self.sends(compressor, rows * workers, workers)
        return sum(_costs.bytes_moved(_KINDS[s.by], nbytes(s.payload), workers) for s in every) // workers

    @abc.abstractmethod
    def steps(self, message: Message, workers: Workers) -> Steps:
        """Takes one message across, in at most one operation of each kind but ``permute``, in the order of :class:`Send`."""
