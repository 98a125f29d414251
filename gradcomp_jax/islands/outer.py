"""The outer step, in NumPy: every operation rounds once, so that all machines get the same bits.

A compiler may contract a product and a sum to one operation, which rounds once where two round twice; and not all do.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]

_SLICE = 1 << 18
"""Entries that are worked on together: they stay in the cache."""


@dataclasses.dataclass(frozen=True)
class OuterState:
    """Holds the centre and the momentum of the outer optimizer. Nothing changes them in place.

    Attributes:
        centre: float32 ``[size]``.
        momentum: float32 ``[size]``; without a momentum ``[0]``.
    """

    centre: Vector
    momentum: Vector

    def parts(self) -> tuple[NDArray, NDArray]:
        """Returns the numbers in little endian; a copy on machines that have them otherwise."""
        return self.centre.astype("<f4", copy=False), self.momentum.astype("<f4", copy=False)

    def to_bytes(self) -> bytes:
        """Returns the object of a snapshot."""
        return b"".join(part.tobytes() for part in self.parts())

    @classmethod
    def from_bytes(cls, data: bytes, size: int) -> "OuterState":
        """Inverts :meth:`to_bytes`."""
        numbers = np.frombuffer(data, "<f4").astype(np.float32)
        return cls(numbers[:size], numbers[size:])


@dataclasses.dataclass(frozen=True)
class OuterStep:
    r"""Makes the step of ``optax.sgd(learning_rate, momentum, nesterov=nesterov)`` along a weighted mean.

    With the islands' :math:`w_i \Delta_i` and weights :math:`w_i`, in the order of the islands' names, and a weight :math:`a`
    of those that are absent, which count as not having moved:

    .. math:: g = \frac{\sum_i w_i \Delta_i}{a + \sum_i w_i}, \quad m \leftarrow g + \mu m, \quad
        c \leftarrow c - \eta\, (g + \mu m) \text{ (Nesterov) or } c - \eta\, m.
    """

    learning_rate: float
    momentum: float = 0.0
    nesterov: bool = True

    def init(self, centre: Vector) -> OuterState:
        """Returns the state before the first step."""
        return OuterState(centre, np.zeros(centre.size if self.momentum else 0, np.float32))

    def __call__(self, state: OuterState, payloads: Iterable[tuple[float, Vector]], absent: float = 0.0) -> OuterState:
        """Returns the state after a step along weights and weighted outer gradients."""
        total, weight = np.zeros_like(state.centre), np.float32(absent)
        for w, outer_gradient in payloads:
            weight = weight + np.float32(w)
            np.add(total, outer_gradient, out=total)
        if not weight > absent:
            return state
        # The sum is nobody else's: the new centre takes its place.
        new, momentum = total, state.momentum.copy()
        rate, mu = np.float32(-self.learning_rate), np.float32(self.momentum)
        for start in range(0, total.size, _SLICE):
            at = slice(start, start + _SLICE)
            move = total[at] / weight
            if self.momentum:
                m = momentum[at]
                np.multiply(m, mu, out=m)
                np.add(move, m, out=m)
                if self.nesterov:
                    np.add(move, m * mu, out=move)
                else:
                    move[:] = m
            np.multiply(move, rate, out=move)
            np.add(state.centre[at], move, out=new[at])
        return OuterState(new, momentum)
