"""Workers that train, as the parent process sees them."""

import itertools
import time
from typing import ClassVar

from benchmarks.sweep.team import START_S, Team


class Workers(Team):
    """Workers that run stretches of steps."""

    program = "benchmarks.world.worker"
    # XLA:CPU has as many threads for programs as a process has cores: with one, an exchange that waits would hold up the steps.
    variables: ClassVar[dict[str, str]] = {"PJRT_NPROC": "4"}

    def stretch(self, first: int, count: int, parts: int) -> list[float]:
        """Seconds of each part of a stretch: so many steps, one after the other, without a pause between parts.

        A part ends when the last worker has done its steps. A pause would let what is in flight arrive for nothing.
        """
        taken = self.order("stretch", first, count, parts, time.monotonic() + START_S)
        ends = [max(of_all) for of_all in zip(*taken, strict=True)]
        return [after - before for before, after in itertools.pairwise(ends)]
