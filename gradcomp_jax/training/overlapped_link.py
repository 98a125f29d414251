"""The link of a chain whose exchange runs beside the steps."""

import dataclasses
from collections.abc import Callable
from typing import Any

from gradcomp_jax._typing import PyTree


@dataclasses.dataclass(frozen=True)
class Link:
    """The link of a chain whose exchanges are late: when they depart, and where they are in its state.

    Attributes:
        place: of the link in the chain.
        delay: steps from the one at whose end an exchange departs to the one in which it lands, at least 1.
        every: steps from one exchange to the next that begins from the state which it leaves.
        departs: of the number of a step and of parts: which part of the tree has its turn at the end of the step, or ``None``.
        pick: of the link's state, the number of the step and the part: a copy of what is sent.
        methods: of the link's state: the exchange's states, by part.
        with_methods: the link's state with other ones.
    """

    place: int
    delay: int
    every: int
    departs: Callable[[int, int], int | None]
    pick: Callable[[Any, int, int], PyTree]
    methods: Callable[[Any], tuple]
    with_methods: Callable[[Any, tuple], Any]

    def check(self, chain: Any) -> None:
        """Refuses the state of a chain that has not this link, or one of another delay or period.

        Raises:
            ValueError: if it does not fit.
        """
        late = chain[self.place] if type(chain) is tuple and len(chain) > self.place else None
        if (getattr(late, "delay", None), getattr(late, "every", None)) != (self.delay, self.every):
            raise ValueError(
                f"the state is not of these steps, whose delay is {self.delay} and whose period is {self.every}: make it with"
                " init_state(params, step.tx, mesh, replicas=True)"
            )
