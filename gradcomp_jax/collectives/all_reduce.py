"""The payloads themselves are added."""

import dataclasses

import jax
import jax.numpy as jnp

from gradcomp_jax.collectives.base import Collective
from gradcomp_jax.collectives.messages import InboundMessage, Message, Send, Steps, Workers
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.memory import Memory


@dataclasses.dataclass(frozen=True)
class AllReduce(Collective):
    """Adds the payloads themselves in an all-reduce, for codes whose payloads add up: 2(N-1)/N payloads are sent."""

    def check(self, compressor: Compressor, memory: Memory) -> None:
        """Refuses payloads that do not add up, and a memory where their sum loses something that no worker can keep."""
        if not compressor.summable:
            raise ValueError(
                f"collective='all_reduce' needs payloads that add up, and those of {type(compressor).__name__} do not; use"
                " collective='two_phase' or 'all_gather' (ternary adds up with share_scale=True, packing='int8')"
            )
        dtypes = [x.dtype for x in jax.tree.leaves(compressor.payload_spec(1))]
        narrow = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4]
        if memory.keeps and narrow:
            raise ValueError(
                f"a sum of {narrow[0]} numbers rounds, and no memory keeps what it loses; use collective='two_phase' or"
                " 'all_gather', dtype='float32', or memory=gradcomp_jax.memory.none()"
            )

    def resolve(self, compressor: Compressor, rows: int, workers: int) -> Collective:
        """Refuses so many workers that an integer sum could wrap."""
        if not fits(compressor, workers):
            raise ValueError(
                f"an int8 sum of {workers} ternaries can wrap (at most {compressor.most_workers} workers);"
                " use collective='two_phase'"
            )
        return self

    def sends(self, compressor: Compressor, rows: int, workers: int) -> list[Send]:
        """Returns the payloads, to be added."""
        return [Send("psum", compressor.payload_spec(rows))]

    def steps(self, message: Message, workers: Workers) -> Steps:
        """Adds the payloads of all workers."""
        total = yield Send("psum", message.payload, shapes=message.shapes)
        total = message.compressor.of_sum(total, workers.count)
        return InboundMessage(total, message.compressor, message.info.side, divisor=workers.count, added=True)


def fits(compressor: Compressor, workers: int) -> bool:
    """Returns whether the sum of all workers' payloads cannot wrap."""
    return compressor.most_workers is None or workers <= compressor.most_workers
