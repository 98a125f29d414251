"""The base class of collectives: how messages cross an axis. A collective checks what it carries, sends it and receives it."""

import abc
import dataclasses

from gradcomp_jax import _costs
from gradcomp_jax.collectives.messages import Message, Remainder, Send, Steps, Workers
from gradcomp_jax.compressors import Compressor, nbytes
from gradcomp_jax.memory import Memory

_KINDS = {"permute": "collective-permute", "all_to_all": "all-to-all", "all_gather": "all-gather", "psum": "all-reduce"}


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
