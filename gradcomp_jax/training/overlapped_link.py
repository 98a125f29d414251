"""The link of a chain whose exchange runs beside the steps."""

import dataclasses
from collections.abc import Callable
from typing import Any

from gradcomp_jax._typing import PyTree


@dataclasses.dataclass(frozen=True)
class Link:
    """Describes the link of a chain whose exchanges are late: when they depart, and where they are in its state.

    Attributes:
        place: the index of the link in the chain.
        delay: steps from the one at whose end an exchange departs to the one in which it lands, at least 1.
        every: steps from one exchange to the next one that starts from the state it leaves.
        departs: returns, for a step and the number of parts, the part whose turn is at the end of the step, or ``None``.
        pick: returns a copy of what is sent, for the link's state, the step and the part.
        methods: returns the exchange's states, by part, for the link's state.
        with_methods: returns the link's state with other states of the exchange.
    """

    place: int
    delay: int
    every: int
    departs: Callable[[int, int], int | None]
    pick: Callable[[Any, int, int], PyTree]
    methods: Callable[[Any], tuple]
    with_methods: Callable[[Any, tuple], Any]

    def check(self, chain: Any) -> None:
        """Refuses the state of a chain without this link, or with another delay or period.

        Raises:
            ValueError: if the state does not fit.
        """
        late = chain[self.place] if type(chain) is tuple and len(chain) > self.place else None
        if (getattr(late, "delay", None), getattr(late, "every", None)) != (self.delay, self.every):
            raise ValueError(
                f"the state is not of these steps, whose delay is {self.delay} and whose period is {self.every}: make it with"
                " init_state(params, step.tx, mesh, replicas=True)"
            )
