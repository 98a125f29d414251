"""The choice of a collective once N is known."""

import dataclasses

from gradcomp_jax import _checks
from gradcomp_jax.collectives.all_gather import AllGather
from gradcomp_jax.collectives.all_reduce import AllReduce, fits
from gradcomp_jax.collectives.base import Collective
from gradcomp_jax.collectives.messages import Message, Send, Steps, Workers
from gradcomp_jax.collectives.recursive_doubling import RecursiveDoubling
from gradcomp_jax.collectives.two_phase import TwoPhase
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.compressors.dense import Dense
from gradcomp_jax.memory import Memory

MOST_RIDING = 2**18
"""Dense tensors of up to so many entries join a payload: above that, the copies cost more than a collective's latency."""

# For up to so many workers a gather of selections sends as few bytes as two phases, in one message, and is exact.
MOST_GATHERED = 2


@dataclasses.dataclass(frozen=True)
class Auto(Collective):
    """Chooses the collective with the fewest bytes; of equal ones, the one with fewer messages.

    Attributes:
        lossy_downlink: whether the choice may be two phases whose downlink loses something. Sparsifiers then take a gather for
            two workers and two phases for any larger number: memory and bytes do not grow with N.
    """

    lossy_downlink: bool = False

    def check(self, compressor: Compressor, memory: Memory) -> None:
        """Accepts everything, because it chooses a collective that works."""

    def resolve(self, compressor: Compressor, rows: int, workers: int) -> Collective:
        """Chooses by the bytes of the code's payloads."""
        if self.lossy_downlink and compressor.downlink(workers).drops:
            # The number of workers alone decides, because whether owners have a residual depends on it, in all groups alike.
            return AllGather() if workers <= MOST_GATHERED else TwoPhase()
        # On equal bytes the earlier one wins: one collective is better than two. A bfloat16 all-reduce is widened to
        # float32 by some backends, where a two-phase exchange of 16-bit words is not.
        is_dense = isinstance(compressor, Dense)
        among: list[Collective] = []
        if compressor.summable and fits(compressor, workers) and (compressor.lossless or not is_dense):
            among.append(AllReduce())
        if compressor.side_information != "mean":
            among.append(AllGather())
            if compressor.exact_downlink(workers) or self.lossy_downlink or is_dense:
                among.append(TwoPhase())
        return min(among, key=lambda c: c.bytes_sent(compressor, rows, workers))

    def owners_from(self, compressor: Compressor, memory: Memory) -> int | None:
        """Returns the fewest workers that do not gather, if owners have a residual from that number on."""
        many = MOST_GATHERED + 1
        chosen = self.resolve(compressor, 1, many)
        keeps = chosen.remainder_of(compressor, memory, many) in ("split", "server")
        return many if keeps else None

    def sends(self, compressor: Compressor, rows: int, workers: int) -> list[Send]:
        """Returns what the cheapest collective sends."""
        return self.resolve(compressor, rows, workers).sends(compressor, rows, workers)

    def steps(self, message: Message, workers: Workers) -> Steps:
        """Raises an error: only the collective that it resolves to can cross."""
        raise TypeError("resolve the collective before a message takes it")


def may_ride(asked: Collective, chosen: Collective, compressor: Compressor) -> bool:
    """Returns whether an all-reduce that ``auto`` chose may be two phases instead, beside a payload that takes two phases.

    An all-reduce is a reduce-scatter and an all-gather. Sending float32 numbers to their owners and back is as many bytes
    and gives the same sums, without a separate collective. Over a slow link that saves the latency of one collective, and
    up to :data:`MOST_RIDING` entries it costs less than that.
    """
    return (
        isinstance(compressor, Dense)
        and compressor.lossless
        and isinstance(asked, Auto)
        and isinstance(chosen, AllReduce)
    )


NAMES = ("auto", "all_gather", "two_phase", "all_reduce", "recursive_doubling")


def as_collective(collective: Collective | str, *, lossy_downlink: bool = False) -> Collective:
    """Returns the collective of a name; a collective itself is returned unchanged.

    Args:
        collective: one of :data:`NAMES`, or an instance.
        lossy_downlink: see :class:`Auto`, for the name ``"auto"``.

    Raises:
        ValueError: for an unknown name.
    """
    if isinstance(collective, Collective):
        return collective
    _checks.one_of("collective", collective, NAMES)
    made = (Auto(lossy_downlink), AllGather(), TwoPhase(), AllReduce(), RecursiveDoubling())
    return made[NAMES.index(collective)]
