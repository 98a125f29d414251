"""The base class of memories: what a worker adds to its gradient, and what it keeps of what it did not send; and no memory."""

import abc
import dataclasses
from typing import Any, ClassVar

from gradcomp_jax import _arguments
from gradcomp_jax._typing import Array


@dataclasses.dataclass(frozen=True)
class Memory(abc.ABC):
    """Keeps state as rows like the gradient's, one for each worker.

    Law: in every step, ``target == sent + kept``, where ``sent`` is the worker's own decoded payload and ``kept`` is
    what the next target starts from. In a dtype narrower than float32 ``kept`` is rounded without bias: see
    :func:`gradcomp_jax.memory.residual`.

    A memory computes in float32. The exchange, which holds its state between two steps, narrows and widens it.

    Attributes:
        dtype: the dtype of its rows, and those of owners: ``float32``, ``bfloat16``, ``int8`` or ``float8_e4m3fn``.
        by_entry: :meth:`compensate` makes an entry of the target from those at its place alone, whatever the shape.
    """

    by_entry: ClassVar[bool] = False
    dtype: str = dataclasses.field(default="float32", kw_only=True)

    @property
    def keeps(self) -> bool:
        """Returns whether anything stays behind; if not, what is not sent is lost (or averages out, if unbiased)."""
        return True

    @property
    def in_a_kernel(self) -> bool:
        """Returns whether a kernel may compensate a tile by itself: :attr:`by_entry`, and no option is traced."""
        return self.by_entry and all(isinstance(value, (bool, int, float, str)) for value in vars(self).values())

    @property
    def counts_sent(self) -> bool:
        """Returns whether it holds what was sent, instead of what was kept."""
        return False

    def on_dense(self, *, lossless: bool) -> "Memory":
        """Returns the memory for leaves whose entries are all sent, ``lossless`` or rounded to a narrower dtype."""
        return self

    def held(self, memory: Any) -> Array:
        """Returns the part of a memory that stays behind: float32 ``[rows, block]``."""
        return memory

    @abc.abstractmethod
    def init(self, rows: Array) -> Any:
        """Returns the memory before the first step, for zeros of float32 ``[rows, block]``."""

    @abc.abstractmethod
    def compensate(self, gradient: Array, memory: Any) -> tuple[Array, Any]:
        """Returns the target, which should be sent, and the memory as far as the gradient determines it."""

    @abc.abstractmethod
    def update(self, target: Array, sent: Array, sent_mask: Array, memory: Any) -> Any:
        """Returns the memory after the exchange.

        Args:
            target: float32 ``[rows, block]``, what :meth:`compensate` returned.
            sent: float32 ``[rows, block]``, the part of the target that counts as sent.
            sent_mask: boolean ``[rows, block]``, the entries that were sent.
            memory: what :meth:`compensate` returned.
        """


@dataclasses.dataclass(frozen=True)
class NoMemory(Memory):
    """Implements :func:`none`."""

    by_entry = True

    @property
    def keeps(self) -> bool:
        """Returns false: nothing is kept."""
        return False

    def init(self, rows: Array) -> Any:
        """Returns ``()``: there is no state."""
        return ()

    def compensate(self, gradient: Array, memory: Any) -> tuple[Array, Any]:
        """Returns the gradient unchanged."""
        return gradient, memory

    def update(self, target: Array, sent: Array, sent_mask: Array, memory: Any) -> Any:
        """Returns the memory, which has no arrays."""
        return memory


@_arguments.checked
def none() -> NoMemory:
    """Keeps nothing. TernGrad has none: its code is unbiased."""
    return NoMemory()
