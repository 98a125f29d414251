"""Recursive doubling: the number of payloads that a worker has doubles in every round."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax import _compat
from gradcomp_jax.collectives.base import Collective
from gradcomp_jax.collectives.messages import InboundMessage, Message, Send, Steps, Workers
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.memory import Memory


@dataclasses.dataclass(frozen=True)
class RecursiveDoubling(Collective):
    """Exchanges between pairs of workers all that they have, in log2(N) rounds.

    Once the dense sum is fewer bytes than the payloads, the sum crosses instead. It sends few messages, for a short
    latency-bound exchange; N must be a power of two.

    References:
        Renggli et al., 2019, SparCML, https://arxiv.org/abs/1802.08021, section 5.3.
    """

    def check(self, compressor: Compressor, memory: Memory) -> None:
        """Refuses a compressor that is not a sparsifier."""
        super().check(compressor, memory)
        if not compressor.is_sparsifier:
            raise ValueError(
                f"collective='recursive_doubling' is for sparsifiers, and {type(compressor).__name__} is none; use"
                " collective='two_phase' or 'all_gather'"
            )

    def resolve(self, compressor: Compressor, rows: int, workers: int) -> Collective:
        """Refuses a number of workers that is not a power of two."""
        if workers & (workers - 1):
            raise ValueError(
                f"recursive doubling needs a power of two of workers, got {workers}; use collective='two_phase'"
            )
        return self

    def sends(self, compressor: Compressor, rows: int, workers: int) -> list[Send]:
        """Returns what each worker has before each round, to its partner."""
        dense = jax.ShapeDtypeStruct((rows, compressor.block), jnp.float32)

        def held(have: int) -> Any:
            if dense_is_less(compressor, have):
                return dense
            payload = compressor.payload_spec(rows)
            return jax.tree.map(lambda a: jax.ShapeDtypeStruct((have, *a.shape), a.dtype), payload)

        return [Send("permute", held(have), _partners(have, workers)) for have in rounds(workers)]

    def steps(self, message: Message, workers: Workers) -> Steps:
        """Exchanges payloads, then sums, with another partner in each round.

        What two groups have is joined in the groups' order on both sides, and sums are of two numbers. So every worker
        adds in the same order and gets the same bits.
        """
        code, info = message.compressor, message.info
        held: Any = jax.tree.map(lambda a: a[None], message.payload)
        whole = False
        for have in rounds(workers.count):
            if not whole and dense_is_less(code, have):
                held, whole = code.reduce(held, info), True
            theirs = yield Send("permute", held, _partners(have, workers.count))
            upper = (workers.index & have) != 0
            held = held + theirs if whole else _in_order(held, theirs, upper)
        total = held if whole else code.reduce(held, info)
        return InboundMessage(_compat.invarying(total, workers.axis_name), None, divisor=workers.count)


def rounds(workers: int) -> list[int]:
    """Returns how many workers' payloads each worker has before each round: 1, 2, 4, ..., N / 2."""
    return [1 << r for r in range(workers.bit_length() - 1)]


def dense_is_less(compressor: Compressor, payloads: int) -> bool:
    """Returns whether a row's float32 sum has no more bytes than this number of payloads of it."""
    return payloads * compressor.payload_bytes(1) >= compressor.block * 4


def _partners(have: int, workers: int) -> tuple[int, ...]:
    return tuple(i ^ have for i in range(workers))


def _in_order(mine: Any, theirs: Any, upper: jax.Array) -> Any:
    """Joins what two groups have, the lower group's first."""
    return jax.tree.map(lambda a, b: jnp.concatenate([jnp.where(upper, b, a), jnp.where(upper, a, b)]), mine, theirs)
