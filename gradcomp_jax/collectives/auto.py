"""The choice of a collective once N is known."""

import dataclasses

from gradcomp_jax import _checks
from gradcomp_jax.collectives.all_gather import AllGather
from gradcomp_jax.collectives.all_reduce import AllReduce, fits
from gradcomp_jax.collectives.base import Collective, Message, Send, Steps, Workers
from gradcomp_jax.collectives.recursive_doubling import RecursiveDoubling
from gradcomp_jax.collectives.two_phase import TwoPhase
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.compressors.dense import Dense
from gradcomp_jax.memory import Memory

# Entries up to which what goes dense joins a payload: beyond, the copies cost more than a collective's latency.
MOST_RIDING = 2**18

# Workers up to which a gather of selections is as few bytes as two phases, in one message in the place of two, and exact.
MOST_GATHERED = 2


@dataclasses.dataclass(frozen=True)
class Auto(Collective):
    """The cheapest collective by bytes, the fewer messages on equal ones.

    Attributes:
        lossy_downlink: whether it may be two phases whose downlink loses something. Sparsifiers then take a gather for two
            workers and two phases for more, however many: memory and bytes do not grow with N.
    """

    lossy_downlink: bool = False

    def check(self, compressor: Compressor, memory: Memory) -> None:
        """Accepts everything: it chooses what goes together."""

    def resolve(self, compressor: Compressor, rows: int, workers: int) -> Collective:
        """Chooses by the bytes of the code's payloads."""
        if self.lossy_downlink and compressor.downlink(workers).drops:
            # By the number of workers alone: whether owners have a residual hangs on it, in every group and bucket alike.
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
        """Returns the fewest workers that do not gather, where owners have a residual from there on."""
        many = MOST_GATHERED + 1
        chosen = self.resolve(compressor, 1, many)
        keeps = chosen.remainder_of(compressor, memory, many) in ("split", "server")
        return many if keeps else None

    def sends(self, compressor: Compressor, rows: int, workers: int) -> list[Send]:
        """Returns what the cheapest collective sends."""
        return self.resolve(compressor, rows, workers).sends(compressor, rows, workers)

    def steps(self, message: Message, workers: Workers) -> Steps:
        """Refuses: only what it resolves to crosses."""
        raise TypeError("resolve the collective before a message takes it")


def rides_along(asked: Collective, chosen: Collective, compressor: Compressor, rows: int) -> bool:
    """Returns whether an all-reduce that ``auto`` chose may be two phases instead, beside a payload that takes them.

    An all-reduce is a reduce-scatter and an all-gather: float32 numbers sent to their owners and back are as many bytes,
    and the same sums, without a collective of their own. Over a slow link that saves the latency of one.
    """
    dense = isinstance(compressor, Dense) and compressor.lossless
    return dense and isinstance(asked, Auto) and isinstance(chosen, AllReduce) and rows <= MOST_RIDING


NAMES = ("auto", "all_gather", "two_phase", "all_reduce", "recursive_doubling")


def as_collective(collective: Collective | str, *, lossy_downlink: bool = False) -> Collective:
    """Returns a collective from its name, or as it is.

    Args:
        collective: one of :data:`NAMES`, or an instance.
        lossy_downlink: see :class:`Auto`, for the name ``"auto"``.

    Raises:
        ValueError: for another name.
    """
    if isinstance(collective, Collective):
        return collective
    _checks.one_of("collective", collective, NAMES)
    made = (Auto(lossy_downlink), AllGather(), TwoPhase(), AllReduce(), RecursiveDoubling())
    return made[NAMES.index(collective)]
