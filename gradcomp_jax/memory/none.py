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
        """Nothing."""
        return False

    def init(self, rows: Array) -> Any:
        """No state."""
        del rows
        return ()

    def compensate(self, gradient: Array, memory: Any) -> tuple[Array, Any]:
        """The gradient as it is."""
        return gradient, memory

    def update(self, target: Array, sent: Array, sent_mask: Array, memory: Any) -> Any:
        """Nothing."""
        del target, sent, sent_mask
        return memory


def none() -> NoMemory:
    """Keeps nothing. TernGrad has none: its code is unbiased."""
    return NoMemory()
