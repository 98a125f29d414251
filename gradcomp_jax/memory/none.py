"""No memory: for unbiased codes, and for sending everything."""

import dataclasses
from typing import Any

from gradcomp_jax._typing import Array
from gradcomp_jax.memory.base import Memory


@dataclasses.dataclass(frozen=True)
class NoMemory(Memory):
    """See :func:`none`."""

    @property
    def keeps(self) -> bool:
        """Returns that nothing is kept."""
        return False

    def init(self, rows: Array) -> Any:
        """Returns ``()``: there is no state."""
        del rows
        return ()

    def compensate(self, gradient: Array, memory: Any) -> tuple[Array, Any]:
        """Returns the gradient as it is."""
        return gradient, memory

    def update(self, target: Array, sent: Array, sent_mask: Array, memory: Any) -> Any:
        """Returns the memory, which has no arrays."""
        del target, sent, sent_mask
        return memory


def none() -> NoMemory:
    """Keeps nothing. TernGrad has none: its code is unbiased."""
    return NoMemory()
