"""Every worker gets every payload."""

import dataclasses

from gradcomp_jax.collectives.base import Collective
from gradcomp_jax.collectives.messages import InboundMessage, Message, Send, Steps, Workers
from gradcomp_jax.compressors import Compressor


@dataclasses.dataclass(frozen=True)
class AllGather(Collective):
    """Sends every payload to every worker, which reduces them itself: nothing is encoded twice, (N-1) payloads are sent.

    It is for few workers.
    """

    def sends(self, compressor: Compressor, rows: int, workers: int) -> list[Send]:
        """Returns the payloads, to all workers."""
        return [Send("all_gather", compressor.payload_spec(rows))]

    def steps(self, message: Message, workers: Workers) -> Steps:
        """Gathers the payloads of all workers."""
        payloads = yield Send("all_gather", message.payload)
        return InboundMessage(payloads, message.compressor, message.info.side, divisor=workers.count, stacked=True)
